"""Members that join and leave a training (`mpigossip join`), and the replay of a training."""
