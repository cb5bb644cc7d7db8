"""What the delta rule costs, what this machine could do, and how near the kernels come to it."""
