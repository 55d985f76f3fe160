//! What a running `fv` tells the doctor: the answer to the request `fv=1` on its control socket, as lines of
//! `key=value`. Other programs do not send that request, and other implementations do not answer it.

use std::fmt::Write as _;
use std::fs;

use forestvpn_quantum::io::{Offloads, SocketBuffers, TunCaps, UdpStatus};
use forestvpn_quantum::{Counters, Status};

/// The answer, without its `errno`. `port` is where the sockets listen.
pub(crate) fn text(status: &Status, counters: &Counters, offloads: Offloads, port: u16) -> String {
    let mut out = String::with_capacity(2048);
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(out, "{key}={value}");
    };
    line("fv", &env!("CARGO_PKG_VERSION"));
    line("up", &status.up);
    line("switched_off", &switched_off(offloads));
    line("cipher", &status.cipher);
    line("threads", &status.threads);
    line("tun_header", &status.tun.vnet);
    line("tun_tso", &status.tun.tso);
    line("tun_uso", &status.tun.uso);
    line("tun_joining", &status.merging);
    line("tun_joining_udp", &status.merging_udp);
    if let Some(udp) = &status.udp {
        line("udp_ipv4", &udp.ipv4);
        line("udp_ipv6", &udp.ipv6);
        line("udp_receive_buffer", &udp.buffers.receive);
        line("udp_send_buffer", &udp.buffers.send);
        line("udp_segments_granted", &udp.granted_segments);
        line("udp_segments", &udp.segments);
        line("udp_paths_without_segments", &udp.paths_without);
        line("udp_gro", &udp.gro);
        line("counter_udp_lost_unread", &unread(port));
    }
    for (name, value) in counters.iter() {
        line(&format!("counter_{name}"), &value);
    }
    out
}

/// The words of FV_NO_OFFLOAD.
pub(super) fn switched_off(offloads: Offloads) -> String {
    let Offloads { tun, tun_gro, tun_udp_gro: _, udp_gso, udp_gro, cipher } = offloads;
    let all =
        [(tun, "tun"), (tun_gro, "tun-gro"), (udp_gso, "udp-gso"), (udp_gro, "udp-gro"), (cipher, "cipher")];
    let off: Vec<_> = all.into_iter().filter(|(on, _)| !on).map(|(_, name)| name).collect();
    off.join(",")
}

/// Datagrams that the kernel threw away because the receive buffer of a socket on `port` was full.
pub(crate) fn unread(port: u16) -> u64 {
    let tables = ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"];
    tables.iter().filter_map(|path| fs::read_to_string(path).ok()).map(|table| drops(&table, port)).sum()
}

/// The last column of the sockets on `port` in a table of `/proc/net/udp`.
fn drops(table: &str, port: u16) -> u64 {
    let of = |line: &str| {
        let (_, hex) = line.split_whitespace().nth(1)?.rsplit_once(':')?;
        (u16::from_str_radix(hex, 16).ok()? == port)
            .then(|| line.split_whitespace().last()?.parse::<u64>().ok())?
    };
    table.lines().skip(1).filter_map(of).sum()
}

/// The answer, read back.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) version: String,
    pub(super) up: bool,
    pub(super) offloads: Offloads,
    pub(super) cipher: String,
    pub(super) threads: String,
    pub(super) tun: TunCaps,
    pub(super) joining: bool,
    pub(super) joining_udp: bool,
    pub(super) udp: Option<UdpStatus>,
    /// In the order they came.
    pub(super) counters: Vec<(String, u64)>,
}

impl Report {
    /// `None`: not the answer of an `fv`, or of one that does not know the request.
    pub(super) fn parse(answer: &str) -> Option<Self> {
        let body = answer.strip_suffix("errno=0\n\n")?;
        let lines: Vec<_> = body.lines().filter_map(|line| line.split_once('=')).collect();
        let text = |key: &str| lines.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let yes = |key| text(key) == Some("true");
        let number = |key| text(key).and_then(|value| value.parse().ok()).unwrap_or(0);
        let counter = |(key, value): &(&str, &str)| {
            Some((key.strip_prefix("counter_")?.to_owned(), value.parse().ok()?))
        };
        Some(Self {
            version: text("fv")?.to_owned(),
            up: yes("up"),
            offloads: Offloads::default()
                .without(text("switched_off").unwrap_or_default())
                .unwrap_or_default(),
            cipher: text("cipher").unwrap_or("?").to_owned(),
            threads: text("threads").unwrap_or("?").to_owned(),
            tun: TunCaps { vnet: yes("tun_header"), tso: yes("tun_tso"), uso: yes("tun_uso") },
            joining: yes("tun_joining"),
            joining_udp: yes("tun_joining_udp"),
            udp: text("udp_ipv4").map(|_| UdpStatus {
                ipv4: yes("udp_ipv4"),
                ipv6: yes("udp_ipv6"),
                buffers: SocketBuffers {
                    receive: number("udp_receive_buffer"),
                    send: number("udp_send_buffer"),
                },
                granted_segments: number("udp_segments_granted"),
                segments: number("udp_segments"),
                paths_without: number("udp_paths_without_segments"),
                gro: yes("udp_gro"),
            }),
            counters: lines.iter().filter_map(counter).collect(),
        })
    }

    /// One counter; 0 when it is not there.
    pub(super) fn counter(&self, name: &str) -> u64 {
        self.counters.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_read_back_says_the_same() {
        let udp = UdpStatus {
            ipv4: true,
            ipv6: false,
            buffers: SocketBuffers { receive: 1, send: 2 },
            granted_segments: 64,
            segments: 1,
            paths_without: 3,
            gro: true,
        };
        let tun = TunCaps { vnet: true, tso: true, uso: false };
        let status = Status {
            up: true,
            threads: 1,
            tun,
            merging: true,
            merging_udp: false,
            udp: Some(udp),
            cipher: "ring",
        };
        let offloads = Offloads { udp_gro: false, tun_gro: false, ..Offloads::default() };
        let answer = text(&status, &Counters::default(), offloads, 0) + "errno=0\n\n";
        let report = Report::parse(&answer).expect("an answer");
        assert_eq!((report.up, report.tun, report.joining, report.udp), (true, tun, true, Some(udp)));
        assert_eq!(report.offloads, offloads);
        assert_eq!(report.version, env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn answers_of_others_are_known_as_such() {
        for answer in
            ["", "errno=-22\n\n", "errno=5\n\n", "errno=0\n\n", "listen_port=1\nerrno=0\n\n", "fv=1\n"]
        {
            assert_eq!(Report::parse(answer), None, "{answer:?}");
        }
        let news = Report::parse("fv=9\nnews=1\ncounter_a=7\nerrno=0\n\n").expect("a newer one");
        assert_eq!((news.counter("a"), news.counter("b"), news.udp), (7, 0, None));
    }

    #[test]
    fn drops_are_those_of_the_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout \
                     inode ref pointer drops\n\
                     1: 00000000:CA6C 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 5 2 0 7\n\
                     2: 00000000:CA6D 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 6 2 0 9\n";
        assert_eq!((drops(table, 51820), drops(table, 51821), drops(table, 1)), (7, 9, 0));
    }
}
