//! The kernel's table (selftest/allowedips.c, as listed in the protocol notes 2.2), and a linear scan as oracle.

use core::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;

const A: PeerId = PeerId(10);
const B: PeerId = PeerId(11);
const C: PeerId = PeerId(12);
const D: PeerId = PeerId(13);
const E: PeerId = PeerId(14);
const F: PeerId = PeerId(15);
const G: PeerId = PeerId(16);
const H: PeerId = PeerId(17);

fn net(s: &str) -> IpNet {
    s.parse().unwrap()
}

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

fn table(entries: &[(PeerId, &str)]) -> Routes {
    let mut routes = Routes::new();
    for (peer, prefix) in entries {
        routes.insert(net(prefix), *peer);
    }
    routes
}

fn listed(routes: &Routes, peer: PeerId) -> Vec<String> {
    routes.list(peer).map(|n| n.to_string()).collect()
}

/// Nothing is left anywhere: neither entries nor trie nodes nor places in a list.
fn assert_empty(routes: &Routes) {
    assert_eq!((routes.v4.len(), routes.v6.len(), routes.order.len()), (0, 0, 0));
    assert_eq!(routes.v4.mem_size(), PrefixMap::<Ipv4Net, Owner>::new().mem_size());
    assert_eq!(routes.v6.mem_size(), PrefixMap::<Ipv6Net, Owner>::new().mem_size());
}

//@test C-AIP-1
#[test]
fn ipv4_lookups_of_the_kernels_table() {
    let mut routes =
        table(&[(A, "192.168.4.0/24"), (B, "192.168.4.4/32"), (C, "192.168.0.0/16"), (D, "192.95.5.64/27")]);
    // The same network with other host bits: it moves.
    assert_eq!(routes.insert(net("192.95.5.65/27"), C), Some(D));
    assert_eq!(listed(&routes, D), [""; 0]);
    for (peer, prefix) in [
        (E, "0.0.0.0/0"),
        (G, "64.15.112.0/20"),
        (H, "64.15.123.211/25"),
        (A, "10.0.0.0/25"),
        (B, "10.0.0.128/25"),
        (A, "10.1.0.0/30"),
        (B, "10.1.0.4/30"),
        (C, "10.1.0.8/29"),
        (D, "10.1.0.16/29"),
    ] {
        assert_eq!(routes.insert(net(prefix), peer), None, "{prefix}");
    }
    for (addr, peer) in [
        ("192.168.4.20", A),
        ("192.168.4.0", A),
        ("192.168.4.4", B),
        ("192.168.200.182", C),
        ("192.95.5.68", C),
        ("192.95.5.96", E),
        ("64.15.116.26", G),
        ("64.15.127.3", G),
        ("64.15.123.1", G),
        ("64.15.123.128", H),
        ("64.15.123.129", H),
        ("10.0.0.52", A),
        ("10.0.0.220", B),
        ("10.1.0.2", A),
        ("10.1.0.6", B),
        ("10.1.0.10", C),
        ("10.1.0.20", D),
    ] {
        assert_eq!(routes.lookup(ip(addr)), Some(peer), "{addr}");
    }
}

//@test C-AIP-1
#[test]
fn ipv6_lookups_of_the_kernels_table() {
    let mut routes =
        table(&[(D, "2607:5300:6000:6b00::c05f:543/128"), (C, "2607:5300:6000:6b00::/64"), (E, "::/0")]);
    assert_eq!(routes.insert(net("::/0"), F), Some(E));
    for (peer, prefix) in [
        (G, "2404:6800::/32"),
        (H, "2404:6800:4004:800:dead:beef:dead:beef/64"),
        (A, "2404:6800:4004:800:dead:beef:dead:beef/128"),
        (C, "2444:6800:40e4:800:deae:beef:def:beef/128"),
        (B, "2444:6800:f0e4:800:eeae:beef::/98"),
    ] {
        assert_eq!(routes.insert(net(prefix), peer), None, "{prefix}");
    }
    for (addr, peer) in [
        ("2607:5300:6000:6b00::c05f:543", D),
        ("2607:5300:6000:6b00::c02e:1ee", C),
        ("2607:5300:6000:6b01::", F),
        ("2404:6800:4004:806::1006", G),
        ("2404:6800:4004:806:0:1234:0:5678", G),
        ("2404:67ff:4004:806:0:1234:0:5678", F),
        ("2404:6801:4004:806:0:1234:0:5678", F),
        ("2404:6800:4004:800:0:1234:0:5678", H),
        ("2404:6800:4004:800::", H),
        ("2404:6800:4004:800:1010:1010:1010:1010", H),
        ("2404:6800:4004:800:dead:beef:dead:beef", A),
        ("2444:6800:40e4:800:deae:beef:def:beef", C),
        ("2444:6800:f0e4:800:eeae:beef:3fff:ffff", B),
        ("2444:6800:f0e4:800:eeae:beef:4000:0", F),
    ] {
        assert_eq!(routes.lookup(ip(addr)), Some(peer), "{addr}");
    }
}

//@test C-AIP-1
#[test]
fn ipv4_and_ipv4_mapped_ipv6_are_different_families() {
    let routes = table(&[(A, "0.0.0.0/0"), (B, "::ffff:10.0.0.0/104")]);
    assert_eq!(routes.lookup(ip("10.0.0.1")), Some(A));
    assert_eq!(routes.lookup(ip("::ffff:10.0.0.1")), Some(B));
    assert_eq!(routes.lookup(ip("::1")), None);
}

// F52
//@test C-AIP-1
#[test]
fn host_bits_are_masked_and_the_same_network_moves() {
    let mut routes = table(&[(A, "10.3.7.8/8")]);
    assert_eq!(listed(&routes, A), ["10.0.0.0/8"]);
    assert_eq!(routes.insert(net("10.9.9.9/8"), B), Some(A));
    assert_eq!(listed(&routes, A), [""; 0]);
    assert_eq!(listed(&routes, B), ["10.0.0.0/8"]);
}

// F51
//@test C-AIP-1
#[test]
fn the_default_route_moves_from_peer_to_peer() {
    let mut routes = table(&[(A, "0.0.0.0/0"), (A, "::/0")]);
    assert_eq!(routes.insert(net("0.0.0.0/0"), B), Some(A));
    assert_eq!(listed(&routes, A), ["::/0"]);
    assert_eq!(routes.lookup(ip("203.0.113.9")), Some(B));
    assert_eq!(routes.lookup(ip("2001:db8::1")), Some(A));
}

//@test C-AIP-2
#[test]
fn only_the_exact_prefix_of_the_right_peer_is_removed() {
    let mut routes = table(&[(A, "192.168.4.0/24"), (A, "2001:db8::/32"), (B, "0.0.0.0/0")]);
    for (prefix, peer) in [
        ("192.168.4.0/25", A),
        ("192.168.4.0/23", A),
        ("192.168.4.0/24", B),
        ("192.168.5.0/24", A),
        ("2001:db8::/33", A),
        ("2001:db8::/32", B),
        ("::/0", A),
    ] {
        assert!(!routes.remove(net(prefix), peer), "{prefix}");
    }
    assert_eq!(listed(&routes, A), ["192.168.4.0/24", "2001:db8::/32"]);
    assert!(routes.remove(net("192.168.4.77/24"), A), "host bits do not matter");
    assert!(!routes.remove(net("192.168.4.0/24"), A), "gone already");
    assert!(routes.remove(net("2001:db8::/32"), A));
    assert!(routes.remove(net("0.0.0.0/0"), B));
    assert_empty(&routes);
}

//@test C-AIP-3
#[test]
fn removing_a_peer_takes_all_its_prefixes_and_nobody_elses() {
    let mut routes = Routes::new();
    for octet in [1, 64, 128, 192, 255] {
        routes.insert(IpNet::new(Ipv4Addr::new(octet, 0, 0, 0).into(), 32).unwrap(), A);
    }
    routes.insert(net("192.168.0.0/16"), A);
    routes.insert(net("192.168.0.0/24"), A);
    routes.insert(net("2001:db8::/48"), A);
    routes.insert(net("192.0.0.0/8"), B);
    routes.remove_peer(PeerId(9));
    routes.remove_peer(A);
    for octet in [1, 64, 128, 255] {
        assert_eq!(routes.lookup(Ipv4Addr::new(octet, 0, 0, 0).into()), None, "{octet}");
    }
    assert_eq!(routes.lookup(ip("192.168.0.1")), Some(B));
    assert_eq!(routes.lookup(ip("192.0.0.0")), Some(B));
    assert_eq!(routes.lookup(ip("2001:db8::1")), None);
    assert_eq!(listed(&routes, A), [""; 0]);
    routes.remove_peer(B);
    assert_empty(&routes);
}

//@test C-AIP-1
#[test]
fn prefixes_that_share_all_but_one_bit_all_fit() {
    let mut routes = Routes::new();
    for i in 0..128u32 {
        routes.insert(IpNet::new(Ipv6Addr::from_bits(!(1 << i)).into(), 128).unwrap(), PeerId(i));
    }
    for i in 0..128u32 {
        assert_eq!(routes.lookup(Ipv6Addr::from_bits(!(1 << i)).into()), Some(PeerId(i)));
    }
    assert_eq!(routes.lookup(Ipv6Addr::from_bits(u128::MAX).into()), None);
}

//@test C-AIP-4
#[test]
fn prefixes_are_listed_masked_and_in_order_of_insertion() {
    let mut routes = table(&[
        (A, "192.95.5.93/27"),
        (A, "26.75.0.0/16"),
        (B, "1.0.0.0/8"),
        (A, "10.1.0.20/29"),
        (A, "2607:5300:6000:6b00:0:1:c05f:543/64"),
        (A, "10.0.0.0/9"),
    ]);
    assert_eq!(
        listed(&routes, A),
        ["192.95.5.64/27", "26.75.0.0/16", "10.1.0.16/29", "2607:5300:6000:6b00::/64", "10.0.0.0/9"]
    );
    // Inserted again, and moved in from another peer: both go last.
    assert_eq!(routes.insert(net("26.75.0.0/16"), A), Some(A));
    assert_eq!(routes.insert(net("1.0.0.0/8"), A), Some(B));
    assert_eq!(
        listed(&routes, A),
        [
            "192.95.5.64/27",
            "10.1.0.16/29",
            "2607:5300:6000:6b00::/64",
            "10.0.0.0/9",
            "26.75.0.0/16",
            "1.0.0.0/8"
        ]
    );
}

/// The kernel's netns.sh puts 255 × 256 networks of each family on one peer; quadratic work would not end.
//@test C-AIP-3
//@test C-AIP-4
#[test]
fn one_peer_can_have_130_000_prefixes_and_lose_them_again() {
    let mut routes = Routes::new();
    let nets: Vec<IpNet> = (0..65_280u32)
        .flat_map(|i| {
            let v4 = Ipv4Addr::from_bits((i + 256) << 8);
            let v6 = Ipv6Addr::from_bits((0x2001_0db8 << 96) | u128::from(i));
            [IpNet::new(v4.into(), 24).unwrap(), IpNet::new(v6.into(), 128).unwrap()]
        })
        .collect();
    nets.iter().for_each(|n| assert_eq!(routes.insert(*n, A), None));
    routes.insert(net("0.0.0.0/0"), B);
    assert!(routes.list(A).eq(nets.iter().copied()));
    assert!(nets.iter().step_by(97).all(|n| routes.lookup(n.addr()) == Some(A)));
    assert!(nets.iter().step_by(2).all(|n| routes.remove(*n, A)));
    assert_eq!(routes.list(A).count(), nets.len() / 2);
    routes.remove_peer(A);
    assert_eq!(routes.lookup(ip("1.2.3.4")), Some(B));
    routes.remove_peer(B);
    assert_empty(&routes);
}

/// The obvious way: every rule in order of insertion, looked through from one end to the other.
#[derive(Default)]
struct Linear(Vec<(IpNet, PeerId)>);

impl Linear {
    fn insert(&mut self, net: IpNet, peer: PeerId) -> Option<PeerId> {
        let at = self.0.iter().position(|(n, _)| *n == net.trunc());
        let before = at.map(|i| self.0.remove(i).1);
        self.0.push((net.trunc(), peer));
        before
    }

    fn remove(&mut self, net: IpNet, peer: PeerId) -> bool {
        let before = self.0.len();
        self.0.retain(|rule| *rule != (net.trunc(), peer));
        self.0.len() != before
    }

    fn lookup(&self, ip: IpAddr) -> Option<PeerId> {
        let hits = self.0.iter().filter(|(n, _)| n.contains(&ip));
        hits.max_by_key(|(n, _)| n.prefix_len()).map(|(_, p)| *p)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(IpNet, PeerId),
    Remove(IpNet, PeerId),
    RemoveKnown(prop::sample::Index, PeerId),
    RemovePeer(PeerId),
}

/// Few distinct bits, so that prefixes nest and meet; the rest of the address varies to be masked away.
fn any_net() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<u32>(), 0u8..=32).prop_map(|(bits, len)| {
        let bits = (bits & 0x0303_0303) | 0x0a00_0000;
        IpNet::new(Ipv4Addr::from_bits(bits).into(), len).unwrap()
    });
    let v6 = (any::<u128>(), 0u8..=128).prop_map(|(bits, len)| {
        let bits = (bits & 0x0003_0001_8000_0001_0000_0003_0000_0101) | (0x2001 << 112);
        IpNet::new(Ipv6Addr::from_bits(bits).into(), len).unwrap()
    });
    prop_oneof![v4, v6]
}

fn any_peer() -> impl Strategy<Value = PeerId> {
    (0u32..6).prop_map(PeerId)
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (any_net(), any_peer()).prop_map(|(n, p)| Step::Insert(n, p)),
        2 => (any_net(), any_peer()).prop_map(|(n, p)| Step::Remove(n, p)),
        3 => (any::<prop::sample::Index>(), any_peer()).prop_map(|(i, p)| Step::RemoveKnown(i, p)),
        1 => any_peer().prop_map(Step::RemovePeer),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    //@test C-AIP-1
    //@test C-AIP-2
    //@test C-AIP-3
    //@test C-AIP-4
    #[test]
    fn answers_agree_with_a_linear_scan_after_every_change(
        steps in prop::collection::vec(any_step(), 1..120),
        asked in prop::collection::vec(any_net().prop_map(|n| n.addr()), 8),
    ) {
        let mut routes = Routes::new();
        let mut linear = Linear::default();
        for step in steps {
            match step {
                Step::Insert(net, peer) => {
                    prop_assert_eq!(routes.insert(net, peer), linear.insert(net, peer));
                }
                Step::Remove(net, peer) => {
                    prop_assert_eq!(routes.remove(net, peer), linear.remove(net, peer));
                }
                Step::RemoveKnown(index, peer) if !linear.0.is_empty() => {
                    let net = index.get(&linear.0).0;
                    prop_assert_eq!(routes.remove(net, peer), linear.remove(net, peer));
                }
                Step::RemoveKnown(..) => {}
                Step::RemovePeer(peer) => {
                    routes.remove_peer(peer);
                    linear.0.retain(|(_, p)| *p != peer);
                }
            }
            for ip in asked.iter().copied().chain(linear.0.iter().map(|(n, _)| n.addr())) {
                prop_assert_eq!(routes.lookup(ip), linear.lookup(ip), "{}", ip);
            }
            for peer in (0..6).map(PeerId) {
                let own = linear.0.iter().filter(|(_, p)| *p == peer).map(|(n, _)| *n);
                prop_assert!(routes.list(peer).eq(own));
            }
        }
        (0..6).for_each(|p| routes.remove_peer(PeerId(p)));
        assert_empty(&routes);
    }
}
