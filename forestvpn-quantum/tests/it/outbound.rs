//! From the TUN device to the wire.

use std::net::SocketAddr;

use forestvpn_quantum::Discard;
use forestvpn_quantum::PrivateKey;
use forestvpn_quantum::batch::{Ecn, Endpoint, LocalAddr};
use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerUpdate};

use crate::harness::*;

//@test C-OUT-1
#[test]
fn only_whole_ip_headers_are_taken() {
    let mut w = World::pair();
    allow6(&mut w, A, B);
    w.connect(A, B);
    let (v4, v6) = (packet(A, B, b"0123456789"), packet6(A, B, b"0123456789"));
    let with_version = |p: &[u8], v: u8| {
        let mut p = p.to_vec();
        p[0] = (v << 4) | (p[0] & 15);
        p
    };
    for (bytes, ok) in [
        (v4[..20].to_vec(), true),
        (v4[..19].to_vec(), false),
        (v4[..1].to_vec(), false),
        (Vec::new(), false),
        (v6[..40].to_vec(), true),
        (v6[..39].to_vec(), false),
        (with_version(&v4, 0), false),
        (with_version(&v4, 5), false),
        (with_version(&v4, 15), false),
        (with_version(&v4, 6), false),
        (with_version(&v6, 7), false),
    ] {
        let sent = w.send(A, &bytes);
        assert_eq!(sent, if ok { Ok(1) } else { Err(Discard::NotIp) }, "{bytes:02x?}");
    }
    assert_eq!(w.discarded(A, Discard::NotIp), 9);
}

//@test C-OUT-1
#[test]
fn the_peer_is_the_longest_prefix_of_the_destination() {
    let mut w = World::new(4);
    for of in 1..4 {
        w.introduce(A, of, true);
        w.introduce(of, A, true);
    }
    for (of, net) in
        [(1, "10.9.0.0/16"), (2, "10.9.8.0/24"), (3, "0.0.0.0/0"), (3, "fd09::/16"), (2, "fd09::9/128")]
    {
        allow(&mut w, A, of, net);
    }
    for of in 1..4 {
        w.connect(A, of);
    }
    for (to, host) in [([10, 9, 0, 1], 1), ([10, 9, 8, 255], 2), ([10, 9, 9, 0], 1), ([8, 8, 8, 8], 3)] {
        let mut p = packet(A, B, b"x");
        p[16..20].copy_from_slice(&to);
        w.send(A, &p).unwrap();
        assert_eq!(w.last(A, 4).to, w.hosts[host].addr, "{to:?}");
    }
    for (last, host) in [(8, 3), (9, 2)] {
        let mut p = packet6(A, B, b"x");
        p[24..40].copy_from_slice(&[0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        w.send(A, &p).unwrap();
        assert_eq!(w.last(A, 4).to, w.hosts[host].addr, "{last}");
    }
    let mut p = packet6(A, B, b"x");
    p[24] = 0xfe;
    assert_eq!(w.send(A, &p), Err(Discard::NoRoute));
}

/// What `calculate_skb_padding` of the kernel gives, written from its description.
fn kernel_padded(len: usize, mtu: usize) -> usize {
    let mut unit = len;
    if mtu != 0 && unit > mtu {
        unit %= mtu;
    }
    let aligned = unit.next_multiple_of(16);
    len + (if mtu == 0 { aligned } else { aligned.min(mtu) } - unit)
}

/// An IPv4 packet of exactly `len` bytes.
fn sized(len: usize) -> Vec<u8> {
    let mut p = packet(A, B, &vec![7; len.saturating_sub(28)]);
    p.truncate(len);
    p[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    p
}

//@test C-OUT-2
#[test]
fn packets_are_padded_to_16_bytes_but_never_beyond_the_mtu() {
    let mut w = World::pair();
    w.connect(A, B);
    // By hand: the lengths that matter (F01, and the seams of each MTU).
    for (mtu, len, padded) in [
        (1420, 20, 32),
        (1420, 32, 32),
        (1420, 33, 48),
        (1420, 84, 96),
        (1420, 1408, 1408),
        (1420, 1409, 1420),
        (1420, 1419, 1420),
        (1420, 1420, 1420),
        (1420, 1421, 1420 + 16),
        (1420, 2840, 2840),
        (1420, 2841, 2840 + 16),
        (68, 65, 68),
        (68, 68, 68),
        (576, 569, 576),
        (1280, 1273, 1280),
        (1280, 1279, 1280),
        (9000, 8993, 9000),
        (9000, 8992, 8992),
        (65475, 65474, 65475),
        (65475, 65475, 65475),
        (0, 1421, 1424),
    ] {
        w.hosts[A].device.set_mtu(mtu);
        w.send(A, &sized(len)).unwrap();
        assert_eq!(w.last(A, 4).bytes.len(), 32 + padded, "packet of {len} at mtu {mtu}");
    }
    for mtu in [68, 576, 1280, 1420, 9000, 65475, 0] {
        w.hosts[A].device.set_mtu(mtu);
        for len in (20..200).chain(1260..1300).chain(1400..1460).chain([2839, 2840, 2841, 8990, 9001, 65_000])
        {
            w.send(A, &sized(len)).unwrap();
            let expected = 32 + kernel_padded(len, mtu.into());
            assert_eq!(w.last(A, 4).bytes.len(), expected, "packet of {len} at mtu {mtu}");
        }
    }
    w.settle();
    let whole = w.hosts[B].delivered.last().unwrap().1.len();
    assert_eq!(whole, 65_000, "padding is gone on the other side");
    assert_eq!(w.hosts[B].delivered.len(), w.kind_by(A, 4).len());
}

//@test C-OUT-2
#[test]
fn a_keepalive_is_32_bytes() {
    let mut w = World::pair();
    w.update_peer(A, B, |p| p.persistent_keepalive = Some(1));
    w.run_for(secs(3.0));
    let sizes: Vec<usize> = w.kind_by(A, 4).iter().map(|s| s.bytes.len()).collect();
    assert_eq!(sizes, [32; 4]);
}

//@test C-OUT-4
#[test]
fn the_outer_mark_is_the_inner_one_but_congestion_stays_inside() {
    let mut w = World::pair();
    allow6(&mut w, A, B);
    w.connect(A, B);
    for (bits, outer) in [(0, Ecn::NotEct), (1, Ecn::Ect1), (2, Ecn::Ect0), (3, Ecn::Ect0)] {
        // With a DSCP all of ones: it must not show, and Ecn has no place for it.
        let mut v4 = packet(A, B, b"x");
        v4[1] = 0xfc | bits;
        w.send(A, &v4).unwrap();
        assert_eq!(w.last(A, 4).ecn, outer, "v4 {bits}");
        let mut v6 = packet6(A, B, b"x");
        let class = 0xfc | bits;
        (v6[0], v6[1]) = (0x60 | (class >> 4), (class << 4) | 0xf);
        w.send(A, &v6).unwrap();
        assert_eq!(w.last(A, 4).ecn, outer, "v6 {bits}");
    }
}

//@test C-OUT-6
#[test]
fn tx_bytes_counts_whole_udp_payloads() {
    // The kernel's own self test: ten pings of 84 bytes.
    let mut w = World::pair();
    for _ in 0..10 {
        w.send(A, &packet(A, B, &[0; 56])).unwrap();
        w.settle();
        w.send(B, &packet(B, A, &[0; 56])).unwrap();
        w.settle();
    }
    let (a, b) = (w.peer(A, B), w.peer(B, A));
    assert_eq!((a.tx_bytes, a.rx_bytes), (148 + 10 * 128, 92 + 10 * 128));
    assert_eq!((b.tx_bytes, b.rx_bytes), (92 + 10 * 128, 148 + 10 * 128));
    // A keepalive is 32 more.
    w.send(A, &packet(A, B, &[0; 56])).unwrap();
    w.run_for(secs(10.0));
    assert_eq!(w.peer(B, A).tx_bytes, b.tx_bytes + 32);
    assert_eq!(w.peer(A, B).rx_bytes, a.rx_bytes + 32);
}

//@test C-OUT-6
#[test]
fn bytes_that_could_not_be_sent_are_taken_back() {
    let mut w = World::pair();
    w.connect(A, B);
    let before = w.peer(A, B).tx_bytes;
    w.send(A, &packet(A, B, &[0; 56])).unwrap();
    let id = w.last(A, 4).peer.unwrap();
    w.hosts[A].device.unsent(id, 128);
    assert_eq!(w.peer(A, B).tx_bytes, before);
    // A count that nobody sent does not wrap.
    w.hosts[A].device.unsent(id, u64::MAX);
    assert_eq!(w.peer(A, B).tx_bytes, 0);
}

/// A UDP packet from `A` to `B` that holds a data message of somebody else's tunnel.
fn nested(hops: u8, ipv6: bool) -> Vec<u8> {
    let mut message = [0; 48];
    (message[0], message[4]) = (4, 0x77);
    let udp = [&[0x12, 0x34, 0x12, 0x35, 0, 56, 0, 0], &message[..]].concat();
    let mut whole = if ipv6 { packet6(A, B, &udp) } else { packet(A, B, &message) };
    let (protocol, ttl) = if ipv6 { (6, 7) } else { (9, 8) };
    (whole[protocol], whole[ttl]) = (17, hops);
    whole
}

#[test]
fn a_message_that_goes_through_another_tunnel_loses_hops_until_it_is_dropped() {
    let mut w = World::pair();
    allow6(&mut w, A, B);
    w.connect(A, B);
    for ipv6 in [false, true] {
        for (inner, outer) in [(255, 247), (64, 56), (9, 1)] {
            w.send(A, &nested(inner, ipv6)).unwrap();
            assert_eq!(w.last(A, 4).hops, Some(outer), "{inner}");
        }
        for inner in [8, 1, 0] {
            assert_eq!(w.send(A, &nested(inner, ipv6)), Err(Discard::Looped), "{inner}");
        }
        // Anything else leaves with the system's default, however near its end it is.
        let mut other = nested(2, ipv6);
        let payload = other.len() - 48;
        other[payload] = 5;
        w.send(A, &other).unwrap();
        assert_eq!(w.last(A, 4).hops, None);
    }
}

//@test C-LOAD-5
#[test]
fn handshake_messages_carry_af41_and_the_rest_does_not() {
    let mut w = World::pair();
    w.connect(A, B);
    let tos = |kind| w.log.iter().filter(|s| s.bytes[0] == kind).map(|s| s.tos).collect::<Vec<_>>();
    assert_eq!((tos(1), tos(2)), (vec![0x88], vec![0x88]));
    assert!(tos(4).iter().all(|&tos| tos == 0));
    let mut w = World::pair();
    crate::cookies::load(&mut w, B);
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.settle();
    assert_eq!(w.last(B, 3).tos, 0);
}

//@test C-OUT-6
#[test]
fn cookie_replies_belong_to_no_peer() {
    let mut w = World::pair();
    crate::cookies::load(&mut w, B);
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.settle();
    assert_eq!(w.kind_by(B, 3).len(), 1);
    assert_eq!(w.peer(B, A).tx_bytes, 0);
    assert_eq!(w.peer(A, B).rx_bytes, 0);
}

fn local(ip: &str) -> LocalAddr {
    LocalAddr { ip: ip.parse().unwrap(), ifindex: 3 }
}

/// A pair with a session; A was reached at `ip` last.
fn reached_at(ip: &str) -> World {
    let mut w = World::pair();
    w.connect(A, B);
    w.send(B, &packet(B, A, b"here")).unwrap();
    let data = w.last(B, 4);
    w.drop_flying();
    let from = Endpoint { remote: data.from, local: Some(local(ip)) };
    w.arrive(A, from, &data.bytes, Ecn::NotEct);
    assert_eq!(w.payloads(A), [b"here"]);
    w
}

fn answers_from(w: &mut World) -> Option<LocalAddr> {
    w.send(A, &packet(A, B, b"answer")).unwrap();
    w.sent_by(A).pop().unwrap().local
}

//@test C-OUT-7
#[test]
fn answers_leave_from_the_address_the_peer_reached() {
    let mut w = reached_at("192.0.2.200");
    assert_eq!(answers_from(&mut w), Some(local("192.0.2.200")));
    // Another of our addresses, the same remote: not a roaming event, but the source follows.
    w.hosts[A].events();
    w.send(B, &packet(B, A, b"again")).unwrap();
    let data = w.last(B, 4);
    w.drop_flying();
    let from = Endpoint { remote: data.from, local: Some(local("192.0.2.201")) };
    w.arrive(A, from, &data.bytes, Ecn::NotEct);
    assert_eq!(answers_from(&mut w), Some(local("192.0.2.201")));
    assert_eq!(w.hosts[A].events(), []);
    // A response leaves from where the initiation arrived.
    let initiation = w.initiation(B, A);
    let from = Endpoint { remote: w.hosts[B].addr, local: Some(local("192.0.2.202")) };
    w.arrive(A, from, &initiation, Ecn::NotEct);
    w.due(A);
    assert_eq!(w.last(A, 2).local, Some(local("192.0.2.202")));
}

//@test C-OUT-7
#[test]
fn a_cookie_reply_leaves_from_where_the_message_arrived() {
    let mut w = World::pair();
    crate::cookies::keep_loaded(&mut w, B);
    let initiation = w.initiation(A, B);
    let from = Endpoint { remote: w.hosts[A].addr, local: Some(local("192.0.2.203")) };
    w.arrive(B, from, &initiation, Ecn::NotEct);
    assert_eq!(w.last(B, 3).local, Some(local("192.0.2.203")));
}

//@test C-OUT-7
#[test]
fn silence_of_the_peer_makes_us_forget_the_source_address() {
    // New-handshake timer: 15 s after data that nobody answered.
    let mut w = reached_at("192.0.2.200");
    w.cut();
    assert_eq!(answers_from(&mut w), Some(local("192.0.2.200")));
    w.run_for(secs(15.4));
    assert_eq!(w.last(A, 1).local, None, "the new initiation goes from wherever the kernel likes");
    // Retransmit timer.
    let mut w = reached_at("192.0.2.200");
    w.cut();
    w.jump(secs(181.0));
    assert_eq!(answers_from(&mut w), Some(local("192.0.2.200")), "the first initiation");
    w.run_for(secs(5.4));
    assert_eq!(w.last(A, 1).local, None, "the second");
}

//@test C-OUT-7
#[test]
fn an_unauthenticated_packet_does_not_move_the_source_address() {
    let mut w = reached_at("192.0.2.200");
    w.send(B, &packet(B, A, b"bad")).unwrap();
    let mut data = w.last(B, 4);
    w.drop_flying();
    *data.bytes.last_mut().unwrap() ^= 1;
    let from = Endpoint { remote: data.from, local: Some(local("192.0.2.209")) };
    w.arrive(A, from, &data.bytes, Ecn::NotEct);
    assert_eq!(answers_from(&mut w), Some(local("192.0.2.200")));
}

//@test C-OUT-7
#[test]
fn a_configured_endpoint_has_no_source_address_yet() {
    let mut w = reached_at("192.0.2.200");
    let addr = w.hosts[B].addr;
    w.update_peer(A, B, |p| p.endpoint = Some(addr));
    assert_eq!(answers_from(&mut w), None);
}

//@test C-OUT-7
#[test]
fn a_local_address_that_failed_is_forgotten_for_that_endpoint_only() {
    let mut w = reached_at("192.0.2.200");
    let remote: SocketAddr = w.hosts[B].addr;
    let other = Endpoint { remote, local: Some(local("192.0.2.7")) };
    w.hosts[A].device.forget_local(other);
    assert_eq!(answers_from(&mut w), Some(local("192.0.2.200")));
    w.hosts[A].device.forget_local(Endpoint { remote, local: Some(local("192.0.2.200")) });
    assert_eq!(answers_from(&mut w), None);
}

//@test C-OUT-8
#[test]
fn a_change_of_port_or_mark_clears_source_addresses() {
    for update in [
        DeviceUpdate { fwmark: Some(51820), ..Default::default() },
        DeviceUpdate { fwmark: Some(0), ..Default::default() },
        DeviceUpdate { listen_port: Some(51821), ..Default::default() },
    ] {
        let mut w = reached_at("192.0.2.200");
        w.configure(A, DeviceUpdate::default());
        assert_eq!(answers_from(&mut w), Some(local("192.0.2.200")), "an update without them does not");
        w.configure(A, update);
        assert_eq!(answers_from(&mut w), None);
    }
}

#[test]
fn packets_that_find_no_room_are_counted_and_burn_no_session() {
    let mut w = World::pair();
    w.connect(A, B);
    let now = w.now();
    let mut bytes = packet(A, B, b"lost");
    let mut full = Collect::full();
    let frame = forestvpn_quantum::batch::Frame { hdr: Default::default(), bytes: &mut bytes };
    assert_eq!(w.hosts[A].device.outbound(now, frame, &mut full), Ok(0));
    assert_eq!(w.discarded(A, Discard::NoRoom), 1);
    let before = w.peer(A, B).tx_bytes;
    w.send(A, &packet(A, B, b"kept")).unwrap();
    w.settle();
    assert_eq!(w.payloads(B).last().unwrap(), b"kept");
    assert_eq!(w.peer(A, B).tx_bytes, before + 32 + 32, "only what was sent is counted");
}

#[test]
fn our_own_message_routed_back_into_its_tunnel_is_dropped_and_other_peoples_are_not() {
    for (outer, other) in [("10.200.0.2:51820", "10.200.0.3:51820"), ("[fd0a::2]:51820", "[fd0a::3]:51820")] {
        let mut w = World::pair();
        let endpoint: SocketAddr = outer.parse().unwrap();
        w.connect(A, B);
        allow(&mut w, A, B, "0.0.0.0/0");
        allow(&mut w, A, B, "::/0");
        w.update_peer(A, B, |p| p.endpoint = Some(endpoint));
        w.send(A, &packet(A, B, b"x")).unwrap();
        let ours = w.last(A, 4).bytes;
        let wrap = |payload: &[u8], to: SocketAddr| match to.ip() {
            std::net::IpAddr::V4(ip) => {
                let mut p = packet(A, B, payload);
                p[16..20].copy_from_slice(&ip.octets());
                p
            }
            std::net::IpAddr::V6(ip) => {
                let udp = packet(A, B, payload);
                let mut p = packet6(A, B, &udp[20..]);
                p[6] = 17;
                p[24..40].copy_from_slice(&ip.octets());
                p
            }
        };
        assert_eq!(w.send(A, &wrap(&ours, endpoint)), Err(Discard::Looped), "{outer}");
        assert_eq!(w.send(A, &wrap(&ours[..40], endpoint)), Err(Discard::Looped), "its first fragment");
        assert_eq!(w.discarded(A, Discard::Looped), 2);
        // A machine behind us that talks to the same endpoint has a session of its own.
        let mut others = ours.clone();
        others[4] ^= 1;
        w.send(A, &wrap(&others, endpoint)).unwrap();
        // To somewhere else it is an onion, not a loop.
        let other: SocketAddr = other.parse().unwrap();
        w.send(A, &wrap(&ours, other)).unwrap();
        for short in [0, 3, 15] {
            w.send(A, &wrap(&ours[..short], endpoint)).unwrap();
        }
    }
}

#[test]
fn syn_packets_are_made_to_fit_in_both_directions_also_while_they_wait_for_a_handshake() {
    use forestvpn_quantum::{DeviceConfig, Mss};
    // A TCP SYN with an option for 1460 bytes, and where that option's value ends up in a packet.
    let syn = |from, to| {
        // After the first eight bytes, which are the harness's own.
        let mut segment = [0; 16];
        segment[4..6].copy_from_slice(&[6 << 4, 2]);
        segment[12..].copy_from_slice(&[2, 4, 5, 180]);
        let mut p = packet(from, to, &segment);
        p[9] = 6;
        p
    };
    let value = |p: &[u8]| u16::from_be_bytes(p[42..44].try_into().unwrap());
    for (clamping, mss, mtu, fits) in [(A, Mss::Most(1300), 1420, 1300), (B, Mss::Auto, 1280, 1240)] {
        let mut w = World::pair();
        w.restart_with(clamping, 1 - clamping, DeviceConfig { mss, mtu, ..DeviceConfig::default() });
        // The first one waits for the handshake.
        for _ in 0..2 {
            w.send(A, &syn(A, B)).unwrap();
            w.settle();
        }
        let all: Vec<_> = w.hosts[B].delivered.iter().map(|(_, p)| value(p)).collect();
        assert_eq!(all, [fits, fits]);
    }
}

//@test C-OUT-3
#[test]
fn senders_are_told_of_packets_without_a_peer_or_an_endpoint_and_of_no_others() {
    let mut w = World::pair();
    w.connect(A, B);
    let stranger = PeerUpdate {
        allowed_ips: vec![AllowedIp { net: "10.9.0.0/16".parse().unwrap(), remove: false }],
        ..PeerUpdate::new(PrivateKey::new([99; 32]).public_key())
    };
    w.configure(A, DeviceUpdate { peers: vec![stranger], ..Default::default() });
    let to = |ip: [u8; 4]| {
        let mut p = packet(A, B, b"x");
        p[16..20].copy_from_slice(&ip);
        p
    };
    let cases = [
        (to([9, 9, 9, 9]), Err(Discard::NoRoute), true),
        (to([10, 9, 0, 1]), Err(Discard::NoEndpoint), true),
        (to([224, 0, 0, 1]), Err(Discard::NoRoute), false),
        (packet(A, B, b"x"), Ok(1), false),
        (packet(A, B, b"x")[..10].to_vec(), Err(Discard::NotIp), false),
    ];
    for (packet, expected, told) in cases {
        let sent = w.send(A, &packet);
        assert_eq!(sent, expected, "{packet:02x?}");
        let why = sent.err().unwrap_or(Discard::Down);
        let answer = w.with(A, |device, now, _| device.unreachable(now, why, &packet));
        assert_eq!(answer.is_some(), told, "{packet:02x?}");
        if let Some(answer) = answer {
            assert_eq!(
                (&answer.as_bytes()[12..16], &answer.as_bytes()[28..]),
                (&packet[16..20], &packet[..])
            );
        }
    }
}

//@test C-OUT-3
#[test]
fn no_more_than_a_thousand_answers_a_second_after_a_burst_of_fifty() {
    let mut w = World::pair();
    let refused = packet(A, B, b"x");
    let told = |w: &mut World, tries: usize| {
        w.with(A, |device, now, _| {
            (0..tries).filter(|_| device.unreachable(now, Discard::NoRoute, &refused).is_some()).count()
        })
    };
    assert_eq!(told(&mut w, 1000), 50);
    w.jump(secs(0.010));
    assert_eq!(told(&mut w, 1000), 10);
    let sum: usize = (0..1000)
        .map(|_| {
            w.jump(secs(0.001));
            told(&mut w, 7)
        })
        .sum();
    assert_eq!(sum, 1000);
    w.jump(secs(3600.0));
    assert_eq!(told(&mut w, 1000), 50, "a long pause saves up no more than a burst");
}
