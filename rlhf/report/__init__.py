"""The over-optimisation report of a round: what is found, drawn and said."""
