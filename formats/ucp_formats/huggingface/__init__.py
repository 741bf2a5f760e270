"""Hugging Face models: safetensors or torch files beside a config.json."""
