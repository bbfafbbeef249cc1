"""Registered components by kind and name."""

from typing import Any, NamedTuple


class Kind(NamedTuple):
    """One kind of component.

    Attributes:
        base: dotted name of the base class, so that a lookup imports nothing else.
        names: registered components: a class, or the dotted name of one.
    """

    base: str
    names: dict[str, type[Any] | str]


def _ours(package: str, **classes: str) -> dict[str, type[Any] | str]:
    return {name: f"obbo_lightning.{package}.{path}" for name, path in classes.items()}


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
            anil="maml.ANIL",
        ),
    ),
    "inner": Kind(
        "obbo_lightning.core.inner_solvers.InnerSolver",
        _ours(
            "core",
            gradient_descent="inner_solvers.GradientDescent",
            sgd="inner_solvers.InnerSGD",
            adam="inner_solvers.InnerAdam",
            exact="inner_solvers.ExactSolution",
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
            synthetic="few_shot.synthetic.SyntheticStream",
            fc100="few_shot.fc100.FC100Stream",
            images="few_shot.images.ImageFolderStream",
            examples="few_shot.vectors.ExampleStream",
            market="market.stream.MarketStream",
            quadratic="quadratic.QuadraticStream",
            follow="arriving.FollowStream",
            sources="labelled.sources.SourcesStream",
            forgetting="tabular.forgetting.ForgettingStream",
            imbalance="labelled.imbalance.ImbalanceStream",
            regularization="labelled.regularization.RegularizationStream",
        ),
    ),
    "problem": Kind(
        "obbo_lightning.core.problem.Problem",
        _ours(
            "problems",
            few_shot="few_shot.FewShot",
            spline="spline.SmoothingSpline",
            quadratic="quadratic.Quadratic",
            sources="sources.SourceWeights",
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
