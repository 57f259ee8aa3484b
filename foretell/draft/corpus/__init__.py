"""Drafts from files that the operator names: finding them, the index over their tokens, its cache, and the drafter."""
