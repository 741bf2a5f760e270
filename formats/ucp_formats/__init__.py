"""The formats and targets that come with ucp; each is found by entry point and knows no other."""
