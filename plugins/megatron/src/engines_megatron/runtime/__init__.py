"""What differs by device: each module's `install` is run by core when the engine is loaded."""
