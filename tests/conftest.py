"""Toy models run faster on one thread than on several that wait for one another."""

import torch

torch.set_num_threads(1)
