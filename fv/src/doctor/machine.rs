//! What this machine gives a tunnel, found out by trying: an interface of its own and a pair of sockets, gone again
//! when it is done.

use std::io::IoSlice;

use forestvpn_quantum::io::{Kernel, Offloads, Tun, TunError, TunQueue, Udp, UdpQueue};
use forestvpn_quantum::offload::VnetHdr;
use serde::Serialize;

use super::equipment::{Equipment, Joining};
use super::finding::{Finding, State, lines};
use crate::netlink::Netlink;

/// All that was found.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    /// A tunnel can run here.
    ok: bool,
    fv: &'static str,
    findings: Vec<Finding>,
    /// Interfaces that are served in user space here.
    running: Vec<String>,
}

impl Machine {
    pub(super) const fn can_run(&self) -> bool {
        self.ok
    }

    pub(super) fn as_text(&self) -> String {
        let mut out = format!("fv {} on this machine\n{}", self.fv, lines(&self.findings));
        out += "\n";
        if self.ok {
            out += "A tunnel can run here.\n";
        }
        for finding in self.findings.iter().filter(|finding| finding.state == State::Fail) {
            let advice = finding.advice.as_deref().unwrap_or("see above");
            out += &format!("No tunnel can run here: {}; {advice}.\n", finding.text);
        }
        for name in &self.running {
            out += &format!("{name} runs: `fv doctor {name}` tells how it does.\n");
        }
        out
    }

    pub(super) fn as_json(&self) -> Result<String, String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(|e| e.to_string())
    }
}

/// Tries everything, as `offloads` would have it used.
pub(super) fn look(offloads: Offloads, running: &[String]) -> Machine {
    let mut findings = vec![kernel(), processors(), cipher(offloads), switches(offloads)];
    let (tun, joining) = try_tun(&mut findings);
    let udp = try_udp(&mut findings);
    let equipment = Equipment { kernel: Kernel::running(), offloads, tun, joining, udp };
    findings.extend(equipment.findings());
    Machine {
        ok: !findings.iter().any(|finding| finding.state == State::Fail),
        fv: env!("CARGO_PKG_VERSION"),
        findings,
        running: running.to_vec(),
    }
}

fn kernel() -> Finding {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Finding::new("kernel", State::Ok, format!("Linux {} on {}", release.trim(), std::env::consts::ARCH))
}

fn processors() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, Into::into);
    let word = if count == 1 { "processor" } else { "processors" };
    Finding::new(
        "threads",
        State::Ok,
        format!("1 carries packets unless --threads asks for more; this machine has {count} {word}"),
    )
}

fn cipher(offloads: Offloads) -> Finding {
    let by = forestvpn_quantum::cipher(offloads.cipher);
    Finding::new("cipher", State::Ok, format!("ChaCha20-Poly1305 by {by}"))
}

fn switches(offloads: Offloads) -> Finding {
    match super::report::switched_off(offloads).as_str() {
        "" => Finding::new("switches", State::Ok, "FV_NO_OFFLOAD switches nothing off"),
        list => Finding::new("switches", State::Off, format!("FV_NO_OFFLOAD switches off {list}")),
    }
}

type TunResult = (Option<forestvpn_quantum::io::TunCaps>, Joining);

fn try_tun(findings: &mut Vec<Finding>) -> TunResult {
    let name = format!("fvdoctor{}", std::process::id());
    let mut tun = match Tun::open(&name) {
        Ok(tun) => tun,
        Err(error) => {
            let at_node = matches!(error, TunError::NoNode | TunError::NodeDenied | TunError::NoDriver);
            if !at_node {
                findings.push(Finding::new("TUN device", State::Ok, "/dev/net/tun may be opened"));
            }
            let what = if at_node { "TUN device" } else { "interface" };
            let text = error.to_string();
            let (text, advice) = text.split_once("; ").unwrap_or((&text, ""));
            findings.push(Finding::new(what, State::Fail, text).advise(advice));
            return (None, Joining::Untried("there is no interface"));
        }
    };
    findings.push(Finding::new("TUN device", State::Ok, "/dev/net/tun may be opened"));
    tun.enable(Offloads::default());
    let up = Netlink::open().and_then(|mut netlink| match netlink.link(&name)? {
        Some(link) => netlink.set_up(link.index, true),
        None => Ok(()),
    });
    match up {
        Ok(()) => findings.push(Finding::new("interface", State::Ok, "may be made and set up")),
        Err(error) => {
            let text = format!("may be made, but not set up: {error}");
            findings.push(Finding::new("interface", State::Fail, text).advise("run as root"));
            return (Some(tun.caps()), Joining::Untried("the interface is not up"));
        }
    }
    let joining = if tun.caps().tso { try_joined(&mut tun) } else { Joining::Untried("no super-packets") };
    (Some(tun.caps()), joining)
}

/// Writes a super-packet of two TCP segments, as the datapath does.
fn try_joined(tun: &mut Tun) -> Joining {
    let (header, packet) = two_segments();
    match tun.send(&header, &[IoSlice::new(&packet)]) {
        Ok(()) => Joining::Works,
        Err(e) => Joining::Refused(e.to_string()),
    }
}

/// Well-formed but for the checksum of its IPv4 header: the driver takes it, and the first look of the IP stack
/// throws it away. So it reaches no program, no packet filter and no other host.
fn two_segments() -> (VnetHdr, [u8; 240]) {
    let mut packet = [0; 240];
    // IPv4, 240 bytes, do not fragment, one hop, TCP, 192.0.2.1 to 192.0.2.2 (RFC 5737).
    packet[..20].copy_from_slice(&[0x45, 0, 0, 240, 0, 1, 0x40, 0, 1, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
    // Ports 9, a header of 20 bytes, ACK.
    packet[20..40].copy_from_slice(&[0, 9, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    let header = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type: VnetHdr::GSO_TCPV4,
        hdr_len: 40,
        gso_size: 100,
        csum_start: 20,
        csum_offset: 16,
    };
    (header, packet)
}

fn try_udp(findings: &mut Vec<Finding>) -> Option<forestvpn_quantum::io::UdpStatus> {
    let mut udp = Udp::new();
    match udp.open(0, 0) {
        Ok(_) => udp.status(),
        Err(error) => {
            findings.push(
                Finding::new("UDP sockets", State::Fail, format!("cannot be opened: {error}"))
                    .advise("look at ulimit -n, and at what confines this process"),
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::alone;

    #[test]
    fn the_packet_of_the_self_test_is_dropped_by_the_first_look_of_the_ip_stack() {
        let (header, packet) = two_segments();
        let sum: u32 =
            packet[..20].as_chunks().0.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
        assert_ne!((sum & 0xffff) + (sum >> 16), 0xffff, "its header checksum is right");
        assert_eq!(usize::from(header.hdr_len) + 2 * usize::from(header.gso_size), packet.len());
        let counted = |name: &str| {
            let text = std::fs::read_to_string("/proc/thread-self/net/snmp").expect("readable");
            let mut lines = text.lines().filter(|line| line.starts_with("Ip:"));
            let names = lines.next().expect("names").split_whitespace();
            let values = lines.next().expect("values").split_whitespace();
            names.zip(values).find(|(n, _)| *n == name).expect(name).1.parse::<u64>().expect("a number")
        };
        alone(|| {
            let mut findings = Vec::new();
            let (caps, joining) = try_tun(&mut findings);
            assert!(caps.expect("an interface").tso && joining == Joining::Works, "{findings:?} {joining:?}");
            assert_eq!(counted("InHdrErrors"), 1);
            assert_eq!(counted("InDelivers") + counted("ForwDatagrams") + counted("OutRequests"), 0);
            assert!(
                !std::fs::read_to_string("/proc/thread-self/net/dev").expect("there").contains("fvdoctor")
            );
        });
    }
}
