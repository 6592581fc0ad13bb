"""What the layouts that share state out have in common: pieces of parameters, and an optimizer that steps only them."""
