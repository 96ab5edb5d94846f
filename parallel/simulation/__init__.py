"""One rank of a learner without its devices: the product's own code on tensors that have a shape and a device, and no
numbers. ``device.py`` is the GPU, ``ranks.py`` stands for all other ranks, ``kernels.py`` for the fused kernels of a
GPU, ``process.py`` for a process that has one. Models and mathematics are not here: they are the learner's own."""
