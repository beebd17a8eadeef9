"""How is attention computed on the CPU?"""
