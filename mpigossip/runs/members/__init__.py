"""Members that come and go (`mpigossip join`), and the replay of their training."""
