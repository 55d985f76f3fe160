//! What was granted of the things that make a tunnel fast, and why not the rest: the same for a machine that is
//! tried out and for a tunnel that runs.

use forestvpn_quantum::io::{Kernel, Offloads, SocketBuffers, TunCaps, UdpStatus};

use super::finding::{Finding, State};
use super::{WANTED, kib};

/// Whether the kernel takes joined writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// It does.
    Works,
    /// It refused one.
    Refused(String),
    /// Nobody could try.
    Untried(&'static str),
}

/// All that is asked for.
#[derive(Debug)]
pub(super) struct Equipment {
    pub(super) kernel: Kernel,
    pub(super) offloads: Offloads,
    pub(super) tun: Option<TunCaps>,
    pub(super) joining: Joining,
    pub(super) udp: Option<UdpStatus>,
}

const SWITCHED_OFF: &str = "switched off by FV_NO_OFFLOAD";

/// One trick: granted or not, switched on or off.
fn trick(what: &str, on: bool, granted: bool, ok: &str, why_not: (&str, &str)) -> Finding {
    match (on, granted) {
        (true, true) => Finding::new(what, State::Ok, ok),
        (true, false) => Finding::new(what, State::No, why_not.0).advise(why_not.1),
        (false, true) => Finding::new(what, State::Off, format!("would work, but is {SWITCHED_OFF}")),
        (false, false) => Finding::new(what, State::Off, SWITCHED_OFF),
    }
}

impl Equipment {
    /// Each thing in one line.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut all = Vec::new();
        if let Some(caps) = self.tun {
            self.tun(caps, &mut all);
        }
        if let Some(udp) = &self.udp {
            self.udp(udp, &mut all);
        }
        all
    }

    fn tun(&self, caps: TunCaps, all: &mut Vec<Finding>) {
        let on = self.offloads;
        let refused = ("the kernel refuses it", "packets cross one by one; a newer kernel may do more");
        let header = ("not to be had: packets cross one by one, with full checksums", refused.1);
        all.push(trick("virtio header", true, caps.vnet, "on every packet", header));
        let tso = "granted: checksum offload, TSO4 and TSO6";
        all.push(trick("TCP super-packets", on.tun, caps.tso, tso, refused));
        let uso = if self.kernel < Kernel(6, 2, 0) {
            ("needs Linux 6.2", "")
        } else {
            ("the kernel refuses it", "UDP is read packet by packet")
        };
        all.push(trick("UDP super-packets", on.tun, caps.uso, "granted: USO4 and USO6", uso));
        let what = "joined writes";
        all.push(match &self.joining {
            _ if !on.tun_gro || !on.tun => trick(what, false, self.joining == Joining::Works, "", refused),
            _ if !caps.tso => Finding::new(what, State::No, "need TCP super-packets"),
            Joining::Works => Finding::new(what, State::Ok, "TCP segments of one flow are written as one"),
            Joining::Refused(error) => {
                Finding::new(what, State::No, format!("the kernel refused one ({error}): not used"))
                    .advise("6.6.44 and 6.1.x, 6.10.x of mid-2024 have this fault; upgrade")
            }
            Joining::Untried(why) => Finding::new(what, State::Note, format!("not tried: {why}")),
        });
    }

    fn udp(&self, udp: &UdpStatus, all: &mut Vec<Finding>) {
        let family = |what, there, advice| {
            let text = if there { "a socket is open" } else { "not available here" };
            Finding::new(what, if there { State::Ok } else { State::No }, text).advise(if there {
                ""
            } else {
                advice
            })
        };
        all.push(family("IPv4", udp.ipv4, "endpoints with IPv4 addresses cannot be reached"));
        all.push(family("IPv6", udp.ipv6, "endpoints with IPv6 addresses cannot be reached"));
        all.push(self.segments(udp));
        let gro = if self.kernel.gro() {
            ("the kernel refuses it", "datagrams are read singly, many per call")
        } else {
            ("not used before Linux 5.12: it can reorder datagrams there", "")
        };
        all.push(trick("UDP_GRO", self.offloads.udp_gro, udp.gro, "granted", gro));
        let size = |what, granted, wanted, advice: &str| {
            if granted < wanted {
                Finding::new(what, State::No, format!("{} instead of {}", kib(granted), kib(wanted)))
                    .advise(advice)
            } else {
                Finding::new(what, State::Ok, kib(granted))
            }
        };
        let advice = format!("bursts may be lost; sysctl -w net.core.rmem_max={}", WANTED.receive);
        all.push(size("receive buffer", udp.buffers.receive, WANTED.receive, &advice));
        let advice = format!("sysctl -w net.core.wmem_max={}", WANTED.send);
        all.push(size("send buffer", udp.buffers.send, WANTED.send, &advice));
    }

    fn segments(&self, udp: &UdpStatus) -> Finding {
        let what = "UDP_SEGMENT";
        if self.offloads.udp_gso && udp.granted_segments > 1 && udp.segments == 1 {
            return Finding::new(what, State::Look, "given up: the kernel could not cut a train (EIO)").advise(
                "the network device on the way out has no checksum offload: ethtool -K DEVICE tx on, or Linux 6.11",
            );
        }
        let why_not = match self.kernel {
            kernel if kernel.gso_segments() > 1 => ("the kernel refuses it", "one datagram per message"),
            kernel if kernel < Kernel(4, 18, 0) => ("needs Linux 4.18", ""),
            _ => (
                "not used on Linux 7.0.0 to 7.1.4: the last datagram of a train arrives corrupt there",
                "upgrade to 7.1.5",
            ),
        };
        let most = udp.granted_segments;
        let limit = if most == 63 { ", one less than from 5.16 on" } else { "" };
        let ok = format!("granted: up to {most} datagrams per send{limit}");
        let mut finding = trick(what, self.offloads.udp_gso, most > 1, &ok, why_not);
        if finding.state == State::Ok && udp.paths_without > 0 {
            finding.state = State::Look;
            finding.text =
                format!("given up towards some addresses ({}), whose path refused trains", udp.paths_without);
            finding.advice =
                Some("their path takes smaller packets than ours: lower the MTU of the tunnel".into());
        }
        finding
    }
}

/// What to say when the sockets got smaller buffers than they asked for.
pub(crate) fn small_buffers(granted: SocketBuffers) -> Option<String> {
    let short = [
        (granted.receive, WANTED.receive, "receive", "rmem_max"),
        (granted.send, WANTED.send, "send", "wmem_max"),
    ];
    let mut parts = Vec::new();
    let mut settings = Vec::new();
    for (granted, wanted, what, setting) in short.into_iter().filter(|(granted, wanted, ..)| granted < wanted)
    {
        parts.push(format!("the {what} buffer is {} instead of {}", kib(granted), kib(wanted)));
        settings.push(format!("sysctl -w net.core.{setting}={wanted}"));
    }
    (!parts.is_empty()).then(|| {
        format!(
            "{}: bursts may be lost. To raise it (in a container: on the host): {}, then set the interface down and up",
            parts.join(", "),
            settings.join("; ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equipment(kernel: Kernel) -> Equipment {
        let granted = kernel.gso_segments();
        Equipment {
            kernel,
            offloads: Offloads::default(),
            tun: Some(TunCaps { vnet: true, tso: true, uso: kernel >= Kernel(6, 2, 0) }),
            joining: Joining::Works,
            udp: Some(UdpStatus {
                ipv4: true,
                ipv6: true,
                buffers: WANTED,
                granted_segments: granted,
                segments: granted,
                paths_without: 0,
                gro: kernel.gro(),
            }),
        }
    }

    fn find(equipment: &Equipment, what: &str) -> Finding {
        let all = equipment.findings();
        all.into_iter().find(|finding| finding.what == what).unwrap_or_else(|| panic!("no {what}"))
    }

    #[test]
    fn a_new_kernel_has_everything() {
        let findings = equipment(Kernel(6, 18, 0)).findings();
        assert!(findings.iter().all(|f| f.state == State::Ok && f.advice.is_none()), "{findings:?}");
    }

    #[test]
    fn an_old_kernel_says_which_version_would_do_more() {
        let old = equipment(Kernel(5, 6, 0));
        assert!(find(&old, "UDP super-packets").text.contains("needs Linux 6.2"));
        assert!(find(&old, "UDP_SEGMENT").text.contains("up to 63"));
        assert!(find(&old, "UDP_GRO").text.contains("before Linux 5.12"));
        let faulty = find(&equipment(Kernel(7, 1, 4)), "UDP_SEGMENT");
        assert!(faulty.state == State::No && faulty.text.contains("7.0.0 to 7.1.4"), "{faulty:?}");
    }

    #[test]
    fn what_was_given_up_or_switched_off_is_told_from_what_was_never_granted() {
        let mut now = equipment(Kernel(6, 18, 0));
        let udp = now.udp.as_mut().expect("set above");
        udp.segments = 1;
        assert!(find(&now, "UDP_SEGMENT").text.contains("EIO"));
        let udp = now.udp.as_mut().expect("set above");
        (udp.segments, udp.paths_without) = (64, 2);
        assert!(find(&now, "UDP_SEGMENT").text.contains("towards some addresses (2)"));
        now.joining = Joining::Refused("EINVAL".into());
        assert_eq!(find(&now, "joined writes").state, State::No);
        now.offloads = Offloads::NONE;
        for what in ["TCP super-packets", "UDP super-packets", "joined writes", "UDP_SEGMENT", "UDP_GRO"] {
            let finding = find(&now, what);
            assert!(finding.state == State::Off && finding.text.contains("FV_NO_OFFLOAD"), "{finding:?}");
        }
    }

    #[test]
    fn small_buffers_name_the_setting_and_buffers_as_wanted_are_not_mentioned() {
        assert_eq!(small_buffers(WANTED), None);
        let text = small_buffers(SocketBuffers { receive: 212_992, ..WANTED }).expect("small");
        assert!(text.contains("208 KiB instead of 4096 KiB"), "{text}");
        assert!(text.contains("net.core.rmem_max=4194304") && !text.contains("wmem_max"), "{text}");
        let mut now = equipment(Kernel(6, 18, 0));
        now.udp.as_mut().expect("set above").buffers = SocketBuffers { receive: 1, send: 1 };
        assert!(find(&now, "receive buffer").advice.expect("advice").contains("rmem_max"));
        assert!(find(&now, "send buffer").advice.expect("advice").contains("wmem_max"));
    }
}
