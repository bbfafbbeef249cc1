"""The kinds of parts, and the names of ours."""

from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What parts of one kind have in common.

    Attributes:
        base: the class that they extend, by name: looking for a part imports nothing else.
        names: the registered ones: a class, or the dotted name of one of ours.
    """

    base: str
    names: dict[str, type[Any] | str]


def _ours(room: str, **classes: str) -> dict[str, type[Any] | str]:
    return {name: f"obbo_lightning.{room}.{place}" for name, place in classes.items()}


KINDS = {
    "algorithm": Kind(
        "obbo_lightning.core.algorithm.Algorithm",
        _ours(
            "algorithms",
            obbo="obbo.OBBO",
            sobbo="sobbo.SOBBO",
            sobow="sobow.SOBOW",
            oagd="oagd.OAGD",
            adam="adam.Adam",
            sgdm="sgdm.SGDM",
            maml="maml.MAML",
            anil="anil.ANIL",
        ),
    ),
    "inner": Kind(
        "obbo_lightning.core.inner.InnerSolver",
        _ours(
            "core",
            gradient_descent="inner.GradientDescent",
            sgd="momentum.InnerSGD",
            adam="momentum.InnerAdam",
            exact="inner.ExactSolution",
        ),
    ),
    "hypergradient": Kind(
        "obbo_lightning.core.hypergradients.base.Estimator",
        _ours(
            "core.hypergradients",
            fixed_point="fixed_point.FixedPoint",
            unrolled="unrolled.Unrolled",
            conjugate_gradient="conjugate_gradient.ConjugateGradient",
            stochastic_neumann="stochastic_neumann.StochasticNeumann",
            closed_form="closed_form.ClosedForm",
        ),
    ),
    "geometry": Kind(
        "obbo_lightning.core.geometry.Geometry",
        _ours(
            "core.geometry",
            adaptive_diagonal="AdaptiveDiagonal",
            euclidean="Euclidean",
            negative_entropy="NegativeEntropy",
            burg="Burg",
        ),
    ),
    "regularizer": Kind(
        "obbo_lightning.core.regularizers.ElasticNet",
        _ours("core.regularizers", none="NoRegularizer", l1="L1", squared_l2="SquaredL2", elastic_net="ElasticNet"),
    ),
    "domain": Kind(
        "obbo_lightning.core.domains.Domain",
        _ours("core.domains", real="RealSpace", box="Box", nonnegative="Nonnegative", ball="L2Ball", simplex="Simplex"),
    ),
    "data": Kind(
        "obbo_lightning.streams.stream.Stream",
        _ours(
            "streams",
            synthetic="synthetic.SyntheticStream",
            fc100="fc100.FC100Stream",
            images="images.ImageFolderStream",
            examples="examples.ExampleStream",
            market="market.MarketStream",
            quadratic="quadratic.QuadraticData",
            follow="follow.FollowStream",
            sources="sources.SourcesStream",
            forgetting="forgetting.ForgettingStream",
            imbalance="imbalance.ImbalanceStream",
            regularization="regularization.RegularizationStream",
        ),
    ),
    "problem": Kind(
        "obbo_lightning.core.problem.Problem",
        _ours(
            "problems",
            few_shot="few_shot.FewShot",
            spline="spline.SmoothingSpline",
            quadratic="quadratic.Quadratic",
            sources="sources.TrustedSources",
            forgetting="forgetting.Forgetting",
            imbalance="imbalance.VectorScaling",
            regularization="regularization.Regularized",
        ),
    ),
    "network": Kind(
        "torch.nn.modules.module.Module",
        _ours("networks", cnn4="cnn4.CNN4", mlp="mlp.MLP", resnet12="resnet12.ResNet12"),
    ),
    "callback": Kind("lightning.pytorch.callbacks.callback.Callback", {}),
}
