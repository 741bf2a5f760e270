"""Run a model that is larger than memory: its layers are read from a checkpoint while the layer before computes.

1. `stream` decides what is read into which parameter, as `load_into` does, and sets hooks on the layers;
2. `ring` keeps K layers in memory, and reads the next one as soon as a layer is done;
3. `share` decides which rank reads which part of a layer, if several hold the same;
4. `experts` reads the experts that the router chose, and keeps the busy ones in a `cache`;
5. `reader` reads parameters into a buffer.
"""
