//! Against a real kernel: an uplink with a default route, a tunnel interface, and what the kernel then does.

use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use super::*;
use crate::namespace::{Namespace, alone};

fn net(text: &str) -> IpNet {
    text.parse().expect("a prefix")
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| net(text)).collect()
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// `up0` with 192.0.2.2/24, 2001:db8::2/64 and default routes; `tun0` stands for the tunnel. Their far ends
/// are in the namespace that is given back.
fn host() -> (Netlink, u32, u32, Namespace) {
    let far = Namespace::new().expect("a second namespace");
    let mut netlink = Netlink::open().expect("netlink");
    let mut index = Vec::new();
    for (name, peer, addresses) in
        [("up0", "far0", ["192.0.2.2/24", "2001:db8::2/64"]), ("tun0", "far1", ["10.9.0.2/24", "fd09::2/64"])]
    {
        netlink.add_veth(name, peer, far.as_fd()).expect("veth");
        let link = netlink.link(name).expect("look up").expect("there");
        for address in addresses {
            netlink.add_address(link.index, net(address)).expect("address");
        }
        netlink.set_up(link.index, true).expect("up");
        index.push(link.index);
        far.run(|| {
            let mut netlink = Netlink::open().expect("netlink");
            let link = netlink.link(peer).expect("look up").expect("there");
            netlink.set_up(link.index, true).expect("up");
        })
        .expect("far end");
    }
    for (to, gateway) in [("0.0.0.0/0", "192.0.2.1"), ("::/0", "2001:db8::1")] {
        let mut route = Route::new(net(to), index[0], MAIN_TABLE);
        route.gateway = Some(ip(gateway));
        netlink.add_route(&route).expect("default route");
    }
    (netlink, index[0], index[1], far)
}

fn state(netlink: &mut Netlink) -> (Vec<Rule>, Vec<Rule>, String) {
    let marks = fs::read_to_string("/proc/sys/net/ipv4/conf/all/src_valid_mark").expect("sysctl");
    (netlink.rules(false).expect("rules"), netlink.rules(true).expect("rules"), marks)
}

#[test]
fn a_full_tunnel_takes_everything_but_the_marked_packets_and_the_local_network_and_is_undone() {
    alone(|| {
        let (mut netlink, uplink, tunnel, _far) = host();
        let before = state(&mut netlink);
        let table = free_table(&mut netlink).unwrap();
        assert_eq!(table, 51820);
        let mut undo = Undo::default();
        let all = nets(&["0.0.0.0/0", "::/0"]);
        assert!(needs_mark(Table::Auto, &all));
        add_routes(&mut netlink, &mut undo, tunnel, Table::Auto, &all, Some(table)).unwrap();
        for (near, far) in [("192.0.2.7", "203.0.113.9"), ("2001:db8::7", "2001:db8:ffff::9")] {
            let mut way = |to, mark| netlink.route_to(ip(to), mark).unwrap().unwrap().index;
            assert_eq!(way(far, 0), tunnel);
            assert_eq!(way(far, table), uplink);
            assert_eq!(way(near, 0), uplink);
        }
        assert_eq!(state(&mut netlink).2.trim(), "1");
        // A second tunnel finds another table, and its rules are its own.
        assert_eq!(free_table(&mut netlink).unwrap(), 51821);
        let one = state(&mut netlink);
        let mut second = Undo::default();
        add_routes(&mut netlink, &mut second, tunnel, Table::Auto, &all, Some(51821)).unwrap();
        drop(second);
        assert_eq!(state(&mut netlink), one);
        drop(undo);
        assert_eq!(state(&mut netlink), before);
    });
}

#[test]
fn other_prefixes_go_into_the_main_table_unless_the_tunnel_has_them_already() {
    alone(|| {
        let (mut netlink, _, tunnel, _far) = host();
        let mut undo = Undo::default();
        let wanted = nets(&[
            "10.9.0.0/28",
            "10.9.0.0/24",
            "10.20.0.0/16",
            "10.20.30.0/24",
            "fd20::/32",
            "10.20.0.0/16",
        ]);
        assert!(!needs_mark(Table::Auto, &wanted));
        add_routes(&mut netlink, &mut undo, tunnel, Table::Auto, &wanted, None).unwrap();
        let mut there: Vec<_> = netlink.routes(false).unwrap();
        there.extend(netlink.routes(true).unwrap());
        let through = |text: &str| {
            there.iter().filter(|r| (r.net, r.index, r.table) == (net(text), tunnel, MAIN_TABLE)).count()
        };
        for text in ["10.9.0.0/24", "10.20.0.0/16", "10.20.30.0/24", "fd20::/32"] {
            assert_eq!(through(text), 1, "{text} in {there:?}");
        }
        assert_eq!(through("10.9.0.0/28"), 0, "the connected network covers it");
    });
}

#[test]
fn a_numbered_table_gets_every_route_and_no_rule_and_off_gets_none() {
    alone(|| {
        let (mut netlink, _, tunnel, _far) = host();
        let before = state(&mut netlink);
        let mut undo = Undo::default();
        let wanted = nets(&["0.0.0.0/0", "10.9.0.0/24", "::/0"]);
        let count = |netlink: &mut Netlink| {
            [false, true].map(|ipv6| netlink.routes(ipv6).unwrap().iter().filter(|r| r.table == 1234).count())
        };
        assert!(!needs_mark(Table::Off, &wanted) && !needs_mark(Table::Number(1234), &wanted));
        add_routes(&mut netlink, &mut undo, tunnel, Table::Off, &wanted, None).unwrap();
        assert_eq!(count(&mut netlink), [0, 0]);
        add_routes(&mut netlink, &mut undo, tunnel, Table::Number(1234), &wanted, None).unwrap();
        assert_eq!(count(&mut netlink), [2, 1]);
        assert_eq!(state(&mut netlink), before);
    });
}

#[test]
fn rules_of_a_killed_tunnel_are_removed_and_those_of_a_living_one_stay() {
    alone(|| {
        let (mut netlink, _, tunnel, _far) = host();
        let before = state(&mut netlink);
        let mut undo = Undo::default();
        let all = nets(&["0.0.0.0/0", "::/0"]);
        add_routes(&mut netlink, &mut undo, tunnel, Table::Auto, &all, Some(51820)).unwrap();
        let living = state(&mut netlink);
        assert_eq!(free_table(&mut netlink).unwrap(), 51821);
        assert_eq!(state(&mut netlink), living);
        // As after kill -9: the interface is gone, and its routes with it; the rules are not.
        netlink.delete_link(tunnel).unwrap();
        assert_eq!(free_table(&mut netlink).unwrap(), 51820);
        assert_eq!(state(&mut netlink).0, before.0);
        assert_eq!(state(&mut netlink).1, before.1);
        drop(undo);
    });
}

#[test]
fn a_failing_step_leaves_nothing_behind() {
    alone(|| {
        let (mut netlink, _, tunnel, _far) = host();
        let before = state(&mut netlink);
        let failing = |netlink: &mut Netlink| {
            let mut undo = Undo::default();
            add_routes(netlink, &mut undo, tunnel, Table::Auto, &nets(&["0.0.0.0/0"]), Some(51820))?;
            add_routes(netlink, &mut undo, 4711, Table::Auto, &nets(&["::/0"]), Some(51820))
        };
        let error = failing(&mut netlink).unwrap_err();
        assert!(error.to_string().starts_with("cannot add the route ::/0 in table 51820: "), "{error}");
        assert_eq!(state(&mut netlink), before);
    });
}

#[test]
fn a_strict_reverse_path_filter_would_drop_the_answers_and_is_loosened_meanwhile() {
    alone(|| {
        let (mut netlink, _, tunnel, far) = host();
        let filter = "/proc/sys/net/ipv4/conf/up0/rp_filter";
        // A server far away sends a datagram in through the uplink.
        let ours = UdpSocket::bind("192.0.2.2:0").unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let to = ours.local_addr().unwrap();
        far.run(|| {
            let mut netlink = Netlink::open().unwrap();
            let lo = netlink.link("lo").unwrap().unwrap();
            let far0 = netlink.link("far0").unwrap().unwrap();
            netlink.add_address(lo.index, net("203.0.113.9/32")).unwrap();
            netlink.add_address(far0.index, net("192.0.2.1/24")).unwrap();
        })
        .unwrap();
        let arrives = || {
            far.run(|| UdpSocket::bind("203.0.113.9:0").unwrap().send_to(b"hello", to).unwrap()).unwrap();
            ours.recv(&mut [0; 16]).is_ok()
        };
        // The first one may have to wait for the neighbour's address, on a busy machine for long.
        let arrives_soon = || (0..30).any(|_| arrives());
        assert!(arrives_soon());
        while ours.recv(&mut [0; 16]).is_ok() {}
        fs::write(filter, "1").unwrap();
        let mut undo = Undo::default();
        add_routes(&mut netlink, &mut undo, tunnel, Table::Auto, &nets(&["0.0.0.0/0"]), Some(51820)).unwrap();
        assert!(!arrives(), "strict drops it; if not, nothing needs to be loosened");
        loosen_reverse_path(&mut undo, "up0");
        assert!(arrives_soon());
        drop(undo);
        assert_eq!(fs::read_to_string(filter).unwrap().trim(), "1");
    });
}

#[test]
fn the_mtu_fits_the_way_to_the_endpoint() {
    alone(|| {
        let (mut netlink, uplink, _, _far) = host();
        assert_eq!(fitting_mtu(&mut netlink, &[], 0), 1420);
        netlink.set_mtu(uplink, 1492).unwrap();
        assert_eq!(fitting_mtu(&mut netlink, &[], 0), 1412);
        assert_eq!(fitting_mtu(&mut netlink, &[ip("203.0.113.9"), ip("2001:db8:1::1")], 0), 1412);
        assert_eq!(fitting_mtu(&mut netlink, &[ip("10.9.0.7")], 0), 1420, "by way of the other interface");
        assert_eq!(fitting_mtu(&mut netlink, &[ip("127.0.0.1")], 0), 65455, "loopback");
    });
}

#[test]
fn ipv6_switched_off_is_seen() {
    alone(|| {
        let (_netlink, _, _, _far) = host();
        assert!(!ipv6_off("tun0"));
        fs::write("/proc/sys/net/ipv6/conf/tun0/disable_ipv6", "1").unwrap();
        assert!(ipv6_off("tun0"));
    });
}
