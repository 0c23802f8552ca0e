"""The result of a federation: its record, the figures in it, and what budgets say of them."""
