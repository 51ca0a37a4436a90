"""When a GPU is out, and when it is good again. Pure: events and probes in, one sentence for each faulty GPU out.

Sources of the Xid table: NVIDIA, "Analyzing Xid Errors with the Xid Catalog"
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), column "Resolution Bucket (Immediate Action)":
RESTART_APP is an application Xid; RESET_GPU, RESTART_BM and the workflows that end in a reset are hardware Xids; IGNORE is a
notice. Deviations: 43 and 45 are IGNORE there because the driver has already ended the channel, so the application is gone
and its job has failed, as with 44. An Xid that is not listed is taken for hardware: a wrong drain heals by
itself after the good probes, a broken GPU that is given out fails one job after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from nodeagent.gpu_source import XidKind


@frozen
class XidRule:
    kind: XidKind
    text: str


def _rules(kind: XidKind, texts: Mapping[int, str]) -> dict[int, XidRule]:
    return {xid: XidRule(kind, text) for xid, text in texts.items()}


XIDS: Mapping[int, XidRule] = {
    **_rules(
        XidKind.APPLICATION,
        {
            8: "the GPU stopped processing the application's work",
            11: "invalid or corrupted push buffer stream",
            13: "graphics engine exception (an illegal instruction or address of the application)",
            25: "invalid or illegal push buffer stream",
            31: "GPU memory page fault (an illegal address of the application)",
            32: "invalid or corrupted push buffer stream",
            39: "copy engine exception",
            40: "copy engine exception",
            41: "copy engine exception",
            43: "the driver ended the application's channel",
            44: "graphics engine fault during a context switch",
            45: "preemptive cleanup of the application's channels",
            60: "security engine exception",
            68: "video decoder exception",
            69: "graphics engine class error",
            70: "copy engine exception",
            71: "copy engine exception",
            72: "copy engine exception",
            75: "copy engine exception",
            76: "copy engine exception",
            77: "copy engine exception",
            80: "corrupted data sent to the GPU",
            82: "JPEG engine exception",
            83: "video decoder exception",
            84: "video decoder exception",
            85: "copy engine exception",
            86: "optical flow engine exception",
            88: "video decoder exception",
            89: "video decoder exception",
            94: "contained memory error: the application that met it is lost, the GPU is not",
            **dict.fromkeys(range(96, 99), "video decoder exception"),
            **dict.fromkeys(range(99, 106), "JPEG engine exception"),
            **dict.fromkeys(range(126, 136), "copy engine exception"),
            139: "optical flow engine exception",
        },
    ),
    **_rules(
        XidKind.HARDWARE,
        {
            46: "the GPU stopped processing and must be reset",
            48: "double-bit memory error",
            54: "auxiliary power is not connected",
            62: "the power management unit halted",
            64: "a bad memory page or row could not be retired",
            74: "NVLink error",
            79: "the GPU has fallen off the bus",
            95: "uncontained memory error: every application on the GPU is affected",
            109: "context switch timeout",
            110: "security fault",
            119: "the GPU's system processor (GSP) does not answer",
            120: "error of the GPU's system processor (GSP)",
            136: "NVLink training failed",
            140: "memory error that could not be corrected",
            143: "the GPU could not be initialized",
            **dict.fromkeys(range(144, 151), "NVLink error"),
            151: "key rotation error",
            155: "NVLink error found by the driver",
            156: "a faulty resource of the GPU is to be retired at the next reset",
            158: "fatal timeout of the GPU",
        },
    ),
    **_rules(
        XidKind.NOTICE,
        {
            14: "notice of the driver",
            37: "driver firmware notice",
            38: "driver firmware notice",
            63: "a memory page or row was marked for retirement",
            66: "illegal access by the driver",
            67: "illegal access by the driver",
            92: "many corrected memory errors",
            93: "the GPU's information store was written too often",
            106: "test message",
            107: "test message",
            108: "an NVLink peer could not translate an address",
            121: "corrected error of the link between the chips",
            137: "NVLink privilege error",
            141: "fast path error",
            154: "the driver changed the recovery action that it asks for",  # read as a probe: recovery action
            157: "a faulty resource of the GPU could not be retired",
            160: "a faulty memory channel is to be retired",
            161: "a faulty memory channel could not be retired",
        },
    ),
}


# nvmlDeviceGpuRecoveryAction_t, as far as it concerns this GPU alone; drivers tell it since 565.
_RECOVERY: Mapping[int, str] = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "the GPU to be drained of traffic with its peers",
    4: "the GPU to be drained and reset",
    6: "a reset of the GPU's bus",
    7: "a reboot of the system",
}


def recovery_complaint(action: int) -> str:
    """A GPU whose driver still asks for a reset is not good, however well it answers."""
    return f"the driver asks for {_RECOVERY[action]}" if action in _RECOVERY else ""


def classify(xid: int) -> XidRule:
    """What an Xid means for the job and the GPU. An unknown one takes the GPU out."""
    return XIDS.get(xid) or XidRule(XidKind.HARDWARE, "an Xid that is not in the catalog")


@frozen
class _Fault:
    text: str
    good_probes: int = 0


class GpuHealth:
    """Which GPUs are out. A hardware Xid or a bad probe takes a GPU out at once; `good_probes_needed` good ones in a row,
    with no further hardware Xid between them, or `clear`, bring it back."""

    def __init__(self, good_probes_needed: int = 12) -> None:
        if good_probes_needed < 1:
            raise ValueError(f"good_probes_needed: {good_probes_needed} is less than 1")
        self._needed = good_probes_needed
        self._faults: dict[str, _Fault] = {}

    def see_xid(self, uuid: str, xid: int) -> XidRule:
        rule = classify(xid)
        if rule.kind is XidKind.HARDWARE:
            self._faults[uuid] = _Fault(f"Xid {xid}: {rule.text}")
        return rule

    def see_probe(self, uuid: str, complaint: str = "") -> None:
        """`complaint` says what is wrong with the GPU, empty for a good probe."""
        fault = self._faults.get(uuid)
        if complaint:
            # The Xid says more than the failing calls that follow from it: it stays in front.
            first = fault.text.partition("; now ")[0] if fault else ""
            text = f"{first}; now {complaint}" if first.startswith("Xid ") else complaint
            self._faults[uuid] = _Fault(text)
        elif fault is not None:
            good = fault.good_probes + 1
            if good >= self._needed:
                del self._faults[uuid]
            else:
                self._faults[uuid] = _Fault(fault.text, good)

    def clear(self, uuid: str) -> None:
        self._faults.pop(uuid, None)

    def forget_all_but(self, uuids: frozenset[str]) -> None:
        """A GPU that was replaced takes its fault with it (GH-4)."""
        self._faults = {uuid: fault for uuid, fault in self._faults.items() if uuid in uuids}

    def fault(self, uuid: str) -> str:
        """Why the GPU is out and how far it is on its way back, empty when it is good."""
        fault = self._faults.get(uuid)
        if fault is None:
            return ""
        if not fault.good_probes:
            return fault.text
        return f"{fault.text} (good again for {fault.good_probes} of {self._needed} probes)"
