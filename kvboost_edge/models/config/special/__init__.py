"""What single families say of themselves in their own way."""
