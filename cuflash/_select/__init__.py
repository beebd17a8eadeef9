"""Which kernels, with which tiles, serve a problem on a device?"""
