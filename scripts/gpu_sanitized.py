"""What gpu_test.py runs under compute-sanitizer's tools, which make everything many times as slow."""

from __future__ import annotations

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
FEWER_IN_DOMAINS = 5
FEWER_IN_RACECHECK = 4
# It does not see that copies of the tensor memory unit are waited for, so it is for kernels without: not for
# wgmma, and not for wide, whose products may be wgmma's.
RACECHECKED = ("naive", "tiled", "fused", "mma")
CONTRACT = "Kernels/EveryKernel.IsWithinTheContractInItsTypesAndPasses/"
TF32 = "Kernels/EveryKernel.StaysNearFullPrecisionWhereTf32IsAllowed/"
# Small tests of every kind of kernel: under a sanitizer all of cuda_test takes too long.
SANITIZED_TESTS = {
    "parts": ("CudaTiles.*", "CudaSoftmax.*", "CudaLaunch.*", "Matrices.*"),
    "simt": (
        *(f"{test}{kernel}" for test in (CONTRACT, TF32) for kernel in ("naive", "tiled", "fused")),
        "FusedShort.IsWithinTheContract",
        "TypesAndBands/FusedTiles.OfHeadDimsTo*",
        "Kernels/Peaks.OfFewKeysAreExact/fused",
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
    "layer": (
        "CudaGemm.SimtIsNearTheTruth",
        "CudaGemm.MmaIsNearTheTruthForAnyStrides",
        "CudaGemm.WgmmaIsNearTheTruthAroundItsTiles",
        "CudaGemm.OneRowIsNearTheTruthWithFewSummandsAndMany",
        "CudaGemm.SplitFactorsKeepTheErrorOfF32",
        "CudaFfn.FewTokensAreNearTheTruth",
        "CudaNorm.BothPassesAreNearTheTruthForEveryType",
        "CudaRope.EveryFormIsNearTheTruth",
    ),
}
RACECHECKED_TESTS = {
    "parts": ("Matrices.*",),
    "simt": (
        *(f"{CONTRACT}{kernel}" for kernel in ("naive", "tiled", "fused")),
        "FusedShort.IsWithinTheContract",
        "Kernels/Peaks.AreMended/fused",
    ),
    "mma": (
        f"{CONTRACT}mma",
        "MmaForward.OfFewTilesIsWithinTheContract",
        "MmaBackward.GivesEachGradientWithoutTheOthers",
        "Kernels/Peaks.AreMended/mma",
    ),
    "layer": ("CudaGemm.SimtIsNearTheTruth", "CudaNorm.BothPassesAreNearTheTruthForEveryType"),
}
