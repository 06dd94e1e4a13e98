"""llama.cpp's API: completion, infill, template rendering, server properties."""
