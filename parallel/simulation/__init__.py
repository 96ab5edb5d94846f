"""One rank of a learner without its devices: the product's own code on tensors that have a shape and a device, and no
numbers. ``device.py`` is the GPU, ``ranks.py`` stands for all other ranks, ``cuda.py`` for what torch asks of a CUDA
build. Models and mathematics are not here: they are the learner's own."""
