"""Attention layers with a proved Lipschitz constant and the interface of torch.nn.MultiheadAttention."""
