"""llama.cpp's API: completion, infill, template rendering and server properties."""
