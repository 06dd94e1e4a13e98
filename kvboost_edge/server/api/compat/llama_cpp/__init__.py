"""llama.cpp's own routes: completion, infill, the template applied, and the server's properties."""
