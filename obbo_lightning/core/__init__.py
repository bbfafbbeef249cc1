"""Mathematics of online bilevel optimization in pure torch."""
