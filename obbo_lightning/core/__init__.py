"""Mathematics of online bilevel optimization in pure torch.

Words and symbols of all modules:

- λ_t ``[lanes, d]``: outer variable, learned online. β_t ``[lanes, p]``: inner variable; ω^k is its k-th iterate.
- f_t, g_t: outer and inner loss of round t. β̂_t(λ) minimises g_t(λ, ·), and F_t(λ) = f_t(λ, β̂_t(λ)).
- Round: a task (or several) is solved at λ_t, and λ_{t+1} is computed from its hypergradient d_t ≈ ∇F_t(λ_t).
- q_t: direction of the outer step, made from the last hypergradients. α: outer step size. η: inner step size.
- Lane: one of several independent problems solved in one batch; row i of every tensor belongs to lane i.
"""
