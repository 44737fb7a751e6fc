"""One package per engine; nothing outside it imports that engine."""
