"""The loop: plan, draft, run, judge, commit, learn."""
