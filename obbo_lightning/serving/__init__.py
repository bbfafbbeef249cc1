"""What was learned, in use: exported, adapted to new classes, asked for predictions and forecasts."""
