//! Every operation against a real kernel, in a network namespace per test.

use std::net::IpAddr;
use std::os::fd::AsFd;

use ipnet::IpNet;
use nix::errno::Errno;

use super::*;
use crate::namespace::{Namespace, alone};

fn net(text: &str) -> IpNet {
    text.parse().expect("a prefix")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A veth whose other end is in the same namespace; both ends up.
fn cable(netlink: &mut Netlink) -> u32 {
    let here = std::fs::File::open("/proc/thread-self/ns/net").expect("own namespace");
    netlink.add_veth("near", "far", here.as_fd()).expect("veth");
    for name in ["near", "far"] {
        let link = netlink.link(name).expect("look up").expect("there");
        netlink.set_up(link.index, true).expect("up");
    }
    netlink.link("near").expect("look up").expect("there").index
}

#[test]
fn a_link_is_found_by_name_and_by_index_and_absence_is_no_error() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        let lo = netlink.link("lo").unwrap().unwrap();
        assert_eq!((lo.name.as_str(), lo.up, lo.mtu), ("lo", true, 65536));
        assert_eq!(netlink.link_at(lo.index).unwrap(), Some(lo));
        assert_eq!(netlink.link("nothere").unwrap(), None);
        assert_eq!(netlink.link_at(4711).unwrap(), None);
    });
}

#[test]
fn mtu_and_state_are_set_and_read_back() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = cable(&mut netlink);
        netlink.set_mtu(index, 1420).unwrap();
        let link = netlink.link_at(index).unwrap().unwrap();
        assert_eq!((link.mtu, link.up), (1420, true));
        netlink.set_up(index, false).unwrap();
        assert!(!netlink.link_at(index).unwrap().unwrap().up);
        assert_eq!(netlink.link_at(index).unwrap().unwrap().mtu, 1420, "down changes nothing else");
        netlink.delete_link(index).unwrap();
        assert_eq!(netlink.link("near").unwrap(), None);
        assert_eq!(netlink.link("far").unwrap(), None);
    });
}

#[test]
fn addresses_of_both_families_are_usable_at_once() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = cable(&mut netlink);
        let wanted = [net("10.9.0.1/24"), net("fd09::1/64")];
        for address in wanted {
            netlink.add_address(index, address).unwrap();
        }
        let there = netlink.addresses(index).unwrap();
        assert!(wanted.iter().all(|address| there.contains(address)), "{there:?}");
        // Without nodad the address would be tentative for a second and this would fail.
        std::net::UdpSocket::bind("[fd09::1]:0").unwrap();
        let again = netlink.add_address(index, wanted[0]).unwrap_err();
        assert!(again.exists(), "{again}");
    });
}

#[test]
fn routes_of_both_families_go_into_the_table_and_are_found_again() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = cable(&mut netlink);
        for (text, table) in [
            ("10.8.0.0/16", MAIN_TABLE),
            ("0.0.0.0/0", 51820),
            ("fd08::/32", MAIN_TABLE),
            ("::/0", 51820),
            ("10.7.0.0/16", 200),
        ] {
            let mut route = Route::new(net(text), index, table);
            route.metric = Some(7);
            netlink.add_route(&route).unwrap();
            let there = netlink.routes(route.net.addr().is_ipv6()).unwrap();
            assert!(there.contains(&route), "{route} not in {there:?}");
            assert!(netlink.add_route(&route).unwrap_err().exists());
        }
    });
}

#[test]
fn a_gateway_is_kept_and_the_way_to_an_address_is_told() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = cable(&mut netlink);
        assert_eq!(netlink.route_to(ip("192.0.2.1"), 0).unwrap(), None);
        netlink.add_address(index, net("10.9.0.1/24")).unwrap();
        let mut route = Route::new(net("192.0.2.0/24"), index, MAIN_TABLE);
        route.gateway = Some(ip("10.9.0.254"));
        netlink.add_route(&route).unwrap();
        let way = netlink.route_to(ip("192.0.2.1"), 0).unwrap().unwrap();
        assert_eq!((way.index, way.gateway), (index, route.gateway));
    });
}

#[test]
fn rules_are_added_in_front_of_the_main_table_and_removed_exactly() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        for ipv6 in [false, true] {
            let before = netlink.rules(ipv6).unwrap();
            let mark = Rule {
                ipv6,
                priority: 32765,
                iif: None,
                not_mark: Some(51820),
                table: 51820,
                suppress_prefix: None,
            };
            let local = Rule {
                ipv6,
                priority: 32764,
                iif: Some("lo".into()),
                not_mark: None,
                table: MAIN_TABLE,
                suppress_prefix: Some(0),
            };
            netlink.add_rule(&mark).unwrap();
            netlink.add_rule(&local).unwrap();
            let there = netlink.rules(ipv6).unwrap();
            let ours: Vec<_> = there.iter().filter(|rule| !before.contains(rule)).cloned().collect();
            assert_eq!(ours, [local.clone(), mark.clone()]);
            assert!(netlink.add_rule(&mark).unwrap_err().exists());
            netlink.delete_rule(&mark).unwrap();
            netlink.delete_rule(&local).unwrap();
            assert_eq!(netlink.rules(ipv6).unwrap(), before);
            assert!(netlink.delete_rule(&mark).unwrap_err().missing());
        }
    });
}

#[test]
fn a_veth_reaches_into_another_namespace() {
    alone(|| {
        let other = Namespace::new().unwrap();
        let mut netlink = Netlink::open().unwrap();
        netlink.add_veth("left", "right", other.as_fd()).unwrap();
        assert!(netlink.link("left").unwrap().is_some());
        assert_eq!(netlink.link("right").unwrap(), None);
        let there = other.run(|| Netlink::open().unwrap().link("right").unwrap()).unwrap();
        assert!(there.is_some());
    });
}

#[test]
fn an_error_says_what_was_tried_and_why_it_failed() {
    alone(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = cable(&mut netlink);
        let error = netlink.set_mtu(index, 20).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EINVAL));
        assert_eq!(
            error.to_string(),
            "cannot set the MTU to 20: Invalid argument (mtu less than device minimum)"
        );
    });
}

#[test]
fn datagrams_are_cut_into_messages_and_garbage_ends_the_cut() {
    let mut bytes = Vec::new();
    for length in [17_u32, 16] {
        bytes.extend(length.to_ne_bytes());
        bytes.resize(bytes.len() + length.next_multiple_of(4) as usize - 4, 0);
    }
    bytes.extend(3_u32.to_ne_bytes());
    assert_eq!(messages(&bytes).map(<[u8]>::len).collect::<Vec<_>>(), [17, 16]);
    assert_eq!(messages(&[40, 0, 0, 0, 1]).count(), 0);
    assert_eq!(messages(&[]).count(), 0);
}
