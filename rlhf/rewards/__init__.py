"""Where scores come from: the gold reward (what is meant) and the firewall around it."""
