//! What each counter of a tunnel means when it is not zero, and what to do about it.

use super::finding::{Finding, State};
use super::report::Report;

/// Name, how bad it is, what happened, what to do.
type Saying = (&'static str, State, &'static str, &'static str);

const SAYINGS: [Saying; 35] = [
    // Losses outside.
    (
        "udp_lost_unread",
        State::Look,
        "datagrams came faster than they were read: the receive buffer was full",
        "raise net.core.rmem_max if the receive buffer above is small; else this CPU is too slow for the rate",
    ),
    (
        "udp_lost_full",
        State::Look,
        "datagrams were not sent: the send buffer stayed full",
        "the way out is slower than what the tunnel is given; normal at the limit of the line",
    ),
    (
        "udp_lost_refused",
        State::Look,
        "datagrams were refused by this system",
        "no route, a packet filter, or too long: `ip route get ENDPOINT`, and the OUTPUT chain",
    ),
    (
        "udp_lost_no_socket",
        State::Look,
        "datagrams were for an IP version without a socket, or the interface was down",
        "give the peer an endpoint of the other IP version, or switch IPv6 on",
    ),
    (
        "udp_truncated",
        State::Look,
        "datagrams were too long and were dropped",
        "not from WireGuard, unless the kernel joined what it should not: try FV_NO_OFFLOAD=udp-gro",
    ),
    (
        "udp_receive_errors",
        State::Note,
        "errors came back for what was sent",
        "a peer's host says that nobody listens there: check its port and that it runs",
    ),
    (
        "udp_source_lost",
        State::Note,
        "a local address was gone, and another one was used",
        "this host's addresses changed",
    ),
    (
        "udp_gso_fallbacks",
        State::Look,
        "trains were refused by the kernel and sent again one by one; nothing was lost",
        "see UDP_SEGMENT above; FV_NO_OFFLOAD=udp-gso does without",
    ),
    // Losses inside.
    (
        "tun_merge_fallbacks",
        State::Look,
        "joined writes were refused and written one by one; nothing was lost",
        "6.6.44 and 6.1.x, 6.10.x of mid-2024 have this fault; upgrade. FV_NO_OFFLOAD=tun-gro does without",
    ),
    (
        "tun_lost_down",
        State::Look,
        "packets of peers were dropped: the interface was down",
        "ip link set the interface up",
    ),
    ("tun_lost_refused", State::Look, "packets of peers were refused by the TUN device", "look at dmesg"),
    ("tun_read_errors", State::Look, "reads from the TUN device failed", "look at dmesg"),
    (
        "bad_offload",
        State::Look,
        "super-packets contradicted themselves and were dropped",
        "a fault of this kernel: FV_NO_OFFLOAD=tun",
    ),
    ("no_room", State::Look, "packets were dropped for want of memory to seal them in", "please report it"),
    (
        "looped",
        State::Look,
        "our own messages were routed back into the tunnel",
        "the route to an endpoint leads through the tunnel: set a fwmark and a rule, as `fv up` does",
    ),
    ("not_ip", State::Note, "packets were no IPv4 or IPv6, or their length was wrong", ""),
    // Whom packets are for.
    (
        "no_route",
        State::Note,
        "packets of this host were for no peer's AllowedIPs (its own multicast is among them)",
        "if it grows with your traffic, a route is wider than the AllowedIPs",
    ),
    (
        "spoofed",
        State::Look,
        "packets of peers had a source that is not in their AllowedIPs",
        "add the network behind the peer to its AllowedIPs here",
    ),
    (
        "no_endpoint",
        State::Look,
        "packets were for a peer whose address is not known",
        "give it an Endpoint, or wait until it calls",
    ),
    (
        "no_key",
        State::Look,
        "messages could not be made: there is no private key, or a key is no key",
        "wg set IFNAME private-key FILE",
    ),
    ("down", State::Note, "packets came while the tunnel was down", ""),
    (
        "given_up",
        State::Look,
        "packets waited for a handshake that never came",
        "a peer does not answer: its address, its port, the packet filters between, its key; `fv show` names it",
    ),
    (
        "staging_full",
        State::Note,
        "packets were too many to wait for a handshake",
        "a peer does not answer, or answers slowly",
    ),
    // What comes from the network.
    (
        "bad_mac1",
        State::Look,
        "handshakes were meant for another public key",
        "a peer has an old public key of this end",
    ),
    (
        "unknown_peer",
        State::Look,
        "handshakes came from keys that are no peer here",
        "a peer is missing here, or has a new key",
    ),
    (
        "bad_tag",
        State::Look,
        "messages did not decrypt",
        "preshared keys differ, or something between changes packets: FV_NO_OFFLOAD=udp-gro,udp-gso at both ends",
    ),
    (
        "old_timestamp",
        State::Look,
        "handshakes were older than one seen before",
        "a peer's clock was set back, or two hosts use one key",
    ),
    (
        "under_load",
        State::Look,
        "handshakes were dropped: too many came from one place",
        "a flood, or very many peers behind one address",
    ),
    (
        "queue_full",
        State::Look,
        "handshakes were dropped: too many waited",
        "a flood; it is answered with cookies, and data goes on",
    ),
    ("malformed", State::Note, "datagrams were no WireGuard messages", "scanners, mostly"),
    (
        "unknown_index",
        State::Note,
        "messages were for sessions that are not there (any more)",
        "normal after a restart",
    ),
    (
        "replayed",
        State::Note,
        "messages came twice or much too late",
        "the network duplicates or reorders packets",
    ),
    ("key_expired", State::Note, "messages came for keys that were too old", ""),
    ("too_frequent", State::Note, "handshakes of one peer followed each other too fast", ""),
    ("bad_cookie", State::Note, "cookie replies fitted nothing that was sent", ""),
];

/// What looks wrong, the worst first.
pub(super) fn wrong(report: &Report) -> Vec<Finding> {
    let told = SAYINGS.iter().filter_map(|&(name, state, text, advice)| {
        let count = report.counter(name);
        (count > 0).then(|| Finding::new(name, state, format!("{count}: {text}")).advise(advice))
    });
    let mut all: Vec<_> = told.collect();
    all.sort_by_key(|finding| finding.state != State::Look);
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use forestvpn_quantum::io::BootClock;
    use forestvpn_quantum::io::mem::{tun_pair, udp_pair};
    use forestvpn_quantum::time::OsEntropy;
    use forestvpn_quantum::{Device, DeviceConfig, Worker};

    use super::*;

    /// What went well, and cookies: those are the answer that `under_load` and `queue_full` are about.
    const WORK: [&str; 10] = [
        "udp_received",
        "udp_sent",
        "udp_reads",
        "udp_writes",
        "tun_read",
        "tun_written",
        "tun_merged_writes",
        "tun_merged_packets",
        "tun_unreachable",
        "cookie_sent",
    ];

    #[test]
    fn every_counter_of_a_worker_has_a_meaning_here_and_nothing_else_has() {
        let (tun, _) = tun_pair(1);
        let (udp, _) = udp_pair("192.0.2.1:1".parse().unwrap(), "192.0.2.2:1".parse().unwrap(), 1);
        let device = Device::new(DeviceConfig::default(), Box::new(OsEntropy));
        let (mut worker, handle) = Worker::new(device, tun, udp, BootClock::default()).expect("a worker");
        let counters = std::thread::scope(|scope| {
            scope.spawn(move || worker.run());
            let counters = handle.counters().expect("it runs");
            handle.stop();
            counters
        });
        // Read from the kernel and not by the worker.
        let counted: BTreeSet<_> = counters.iter().map(|(name, _)| name).chain(["udp_lost_unread"]).collect();
        let known: BTreeSet<_> = SAYINGS.iter().map(|saying| saying.0).chain(WORK).collect();
        assert_eq!(known.len(), SAYINGS.len() + WORK.len(), "something is there twice");
        assert_eq!(counted, known, "SAYINGS explains each counter but those of WORK");
    }

    #[test]
    fn only_what_happened_is_told_and_losses_come_before_noise() {
        let answer = "fv=1\ncounter_no_route=5\ncounter_udp_lost_full=7\ncounter_spoofed=0\ncounter_udp_sent=9\n\
                      errno=0\n\n";
        let wrong = wrong(&Report::parse(answer).expect("an answer"));
        let names: Vec<_> = wrong.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(names, ["udp_lost_full", "no_route"]);
        assert!(wrong[0].text.starts_with("7: datagrams were not sent"), "{}", wrong[0].text);
    }
}
