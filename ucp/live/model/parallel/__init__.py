"""Plain modules with local shapes: which layers and experts they hold, and how their tensors are cut."""
