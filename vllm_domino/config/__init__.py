"""What a drafter is, read from its checkpoint, and the recipes that say what to make of it."""
