"""Many copies of a model in numbers: who comes when, who is sent where, and how long everybody waits."""
