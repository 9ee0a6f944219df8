"""A tiny LLaMA under transformers' Trainer and under PaddleFormers'."""
