"""The result: the one object between measuring, judging and reporting."""
