"""Products of rows, sorted into groups, with each group's matrix: the experts of a layer, with packed weights."""
