"""What gpu_test.py runs under compute-sanitizer's tools, which make everything many times as slow."""

from __future__ import annotations

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
FEWER_IN_DOMAINS = 5
# Of mma's problems in f32 two must do, since racecheck has no more: one packed, of a head dim to 64, one with
# key lengths and a larger one, both with a sequence that mma leaves to fused and one that it does not.
F32_SEED = 137
FEWER_OF_TOOL = {"racecheck": 4, "initcheck": 2}  # the slowest
# It does not see that copies of the tensor memory unit are waited for, so it is for kernels without: not for
# wgmma, and not for wide, whose products may be wgmma's.
RACECHECKED = ("naive", "tiled", "fused", "mma")
CONTRACT = "Kernels/EveryKernel.IsWithinTheContractInItsTypesAndPasses/"
TF32 = "Kernels/EveryKernel.StaysNearFullPrecisionWhereTf32IsAllowed/"
FUSED_TILES = "TypesAndBands/FusedTiles.OfHeadDimsTo"
# Small tests of every kind of kernel: under a sanitizer all of cuda_test takes too long. A family has a
# process for itself. A name, or a pattern, of which no test runs is a failure.
SANITIZED_TESTS = {
    "parts": ("CudaTiles.*", "CudaKeyGrid.*", "CudaSoftmax.*", "CudaLaunch.*", "Matrices.*"),
    "simt": (
        *(f"{test}{kernel}" for test in (CONTRACT, TF32) for kernel in ("naive", "tiled", "fused")),
        "FusedShort.IsWithinTheContract",
    ),
    "tiles": (f"{FUSED_TILES}*",),
    "peaks": (
        "Kernels/Peaks.OfFewKeysAreExact/fused",
        "Kernels/Peaks.OfFewKeysInManyTilesAreExact/fused",
    ),
    "mma": (
        *(f"{test}mma" for test in (CONTRACT, TF32)),
        "MmaForward.OfFewTilesIsWithinTheContract",
        "MmaForward.InPartsOfKeysIsWithinTheContract",
        "MmaForward.OfAStreamOfKeysIsWithinTheContract",
        "MmaBackward.GivesEachGradientWithoutTheOthers",
        "MmaBackward.IsWithinTheContractAtOddHeadDims",
        "MmaF32.OfAWindowIsWithinTheContract",
        "Kernels/Peaks.OfFewKeysAreExact/mma",
    ),
    "wgmma": (
        *(f"{test}wgmma" for test in (CONTRACT, TF32)),
        "WgmmaForward.TakesOtherHeadDimsOfValues",
        "WgmmaForward.TakesRowsOfAlignedStrides",
        "WgmmaForward.TakesDropout",
        "WgmmaForward.JoinsSharesOfKeys",
    ),
    "wide": (f"{CONTRACT}wide",),
    "layer": (
        "CudaGemm.SimtIsNearTheTruth",
        "CudaGemm.MmaIsNearTheTruthForAnyStrides",
        "CudaGemm.WgmmaIsNearTheTruthAroundItsTiles",
        "CudaGemm.OneRowIsNearTheTruthWithFewSummandsAndMany",
        "CudaGemm.SplitFactorsKeepTheErrorOfF32",
        "CudaFfn.FewTokensAreNearTheTruth",
        "CudaNorm.BothPassesAreNearTheTruthForEveryType",
        "CudaNormRing.GradientsOfEveryLengthAreNearTheTruth",
        "CudaRope.EveryFormIsNearTheTruth",
    ),
}
RACECHECKED_TESTS = {
    "parts": ("Matrices.*",),
    "simt": (
        *(f"{CONTRACT}{kernel}" for kernel in ("naive", "tiled", "fused")),
        "FusedShort.IsWithinTheContract",
    ),
    "tiles": tuple(
        f"{FUSED_TILES}{dim}AreWithinTheContract/{dtype}" for dim in (64, 128) for dtype in ("f32", "bf16")
    ),
    "peaks": (
        "Kernels/Peaks.AreMended/fused",
        "Kernels/Peaks.OfFewKeysAreExact/fused",
        "Kernels/Peaks.OfFewKeysInManyTilesAreExact/fused",
    ),
    "mma": (
        f"{CONTRACT}mma",
        "MmaForward.OfFewTilesIsWithinTheContract",
        "MmaBackward.GivesEachGradientWithoutTheOthers",
        "Kernels/Peaks.AreMended/mma",
        "Kernels/Peaks.OfFewKeysAreExact/mma",
    ),
    "layer": ("CudaGemm.SimtIsNearTheTruth", "CudaNorm.BothPassesAreNearTheTruthForEveryType"),
}
