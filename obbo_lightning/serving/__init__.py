"""What was learned, in use: exported, adapted to new classes, asked for predictions. Pure torch, no training data."""
