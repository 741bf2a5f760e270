"""How values are printed: units, pages of rows and lists, and the overview of an index."""
