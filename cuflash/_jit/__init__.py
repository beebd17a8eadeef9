"""How does CUDA text become a kernel that can be launched?"""
