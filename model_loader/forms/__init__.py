"""Where a prepared form comes from: made by the recipe, or copied from wherever somebody made it before."""
