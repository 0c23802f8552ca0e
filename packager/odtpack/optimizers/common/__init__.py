"""What optimizers share: the base of all, moments, groups, and the model around a formula."""
