"""The trainer that ships with dips: a small LLaMA-style byte model, its data, its loop and its evaluation."""
