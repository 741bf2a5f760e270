"""Sparse windows of MoEvement, a fork of DeepSpeed (`deepspeed/moevement/`, commit daf70b3)."""
