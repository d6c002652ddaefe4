"""What nothing of pyro_dak may import."""
