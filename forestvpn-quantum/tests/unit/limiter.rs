//! The kernel's table (selftest/ratelimiter.c, as listed in the protocol notes 2.2), and the bounds.

use core::net::{Ipv4Addr, Ipv6Addr};

use super::*;

const MS: u64 = 1_000_000;

fn at(ms: u64) -> Instant {
    Instant::from_nanos(5_000_000_000 + ms * MS)
}

fn v4(last: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + last).into()
}

fn v6(net: u64, host: u64) -> IpAddr {
    Ipv6Addr::from_bits((u128::from(net) << 64) | u128::from(host)).into()
}

/// Five at once, then one per 50 ms, as often as `hosts` likes to ask.
fn burst_then_refill(mut hosts: impl FnMut() -> IpAddr) {
    let mut l = Limiter::new([7; 16]);
    for i in 0..5 {
        assert!(l.allow(hosts(), at(0)), "burst {i}");
    }
    assert!(!l.allow(hosts(), at(0)), "the sixth of a burst");
    assert!(l.allow(hosts(), at(50)));
    assert!(!l.allow(hosts(), at(50)));
    assert!(l.allow(hosts(), at(150)));
    assert!(l.allow(hosts(), at(150)));
    assert!(!l.allow(hosts(), at(150)));
    assert!(!l.allow(hosts(), at(199)));
    assert!(l.allow(hosts(), at(200)));
}

//@test C-LOAD-2
#[test]
fn one_ipv4_address_gets_five_at_once_and_twenty_a_second() {
    burst_then_refill(|| v4(1));
}

//@test C-LOAD-2
#[test]
fn ipv6_hosts_of_one_64_share_a_bucket() {
    let mut host = 0;
    burst_then_refill(|| {
        host += 0x1_0001;
        v6(0x2001_0db8_0000_0001, host)
    });
}

//@test C-LOAD-2
#[test]
fn other_addresses_and_other_64s_are_not_held_up_by_an_empty_bucket() {
    let mut l = Limiter::new([0; 16]);
    for ip in [v4(1), v6(1, 1)] {
        (0..5).for_each(|_| assert!(l.allow(ip, at(0))));
        assert!(!l.allow(ip, at(0)));
    }
    assert!(l.allow(v4(2), at(0)));
    assert!(l.allow(v6(2, 1), at(0)));
    // 10.0.0.1 spelt as IPv4-mapped IPv6 is the same host.
    assert!(!l.allow(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().into(), at(0)));
}

//@test C-LOAD-2
#[test]
fn an_empty_bucket_stays_empty_over_the_collection_of_idle_ones() {
    let mut l = Limiter::new([1; 16]);
    let mut allowed = 0;
    // 10 ms apart for 3 s across several collections: the burst and twenty per second, no more.
    for ms in (0..3000).step_by(10) {
        allowed += usize::from(l.allow(v4(9), at(ms)));
    }
    assert_eq!(allowed, 5 + 59);
}

//@test C-LOAD-2
#[test]
fn a_full_table_refuses_newcomers_until_the_idle_ones_are_forgotten() {
    let mut l = Limiter::new([3; 16]);
    for i in 0..CAPACITY as u32 {
        // Half of each family.
        let ip = if i % 2 == 0 { v4(i) } else { v6(u64::from(i), 0) };
        assert!(l.allow(ip, at(0)), "source {i}");
    }
    assert_eq!(l.len(), CAPACITY);
    assert!(!l.allow(v4(1 << 20), at(0)));
    assert!(!l.allow(v4(1 << 20), at(900)));
    // The known ones go on; this one also survives the next collection.
    assert!(l.allow(v4(0), at(900)));
    assert!(!l.allow(v4(1 << 20), at(1500)), "idle for a second, not yet collected");
    assert!(l.allow(v4(0), at(2400)));
    assert!(l.allow(v4(1 << 20), at(2500)));
    assert_eq!(l.len(), 2);
}

//@test C-LOAD-2
#[test]
fn after_two_seconds_of_silence_everybody_is_forgotten_at_once() {
    let mut l = Limiter::new([6; 16]);
    for i in 0..CAPACITY as u32 {
        assert!(l.allow(v4(i), at(0)));
    }
    assert!(l.allow(v4(1 << 20), at(2000)));
    assert_eq!(l.len(), 1);
}

//@test C-LOAD-2
#[test]
fn memory_is_given_back_when_the_load_is_over() {
    let mut l = Limiter::new([4; 16]);
    assert_eq!(l.young.capacity() + l.old.capacity(), 0);
    assert_eq!(l.deadline(), None);
    for i in 0..CAPACITY as u32 {
        assert!(l.allow(v4(i), at(0)));
    }
    assert!(!l.allow(v4(1 << 20), at(1)));
    let mut turns = 0;
    while let Some(due) = l.deadline() {
        l.collect(due);
        turns += 1;
        assert!(turns <= 2, "two collections forget everybody");
    }
    assert_eq!((l.len(), l.young.capacity() + l.old.capacity()), (0, 0));
}

//@test C-LOAD-2
#[test]
fn a_clock_that_steps_back_neither_panics_nor_fills_the_bucket() {
    let mut l = Limiter::new([5; 16]);
    (0..5).for_each(|_| assert!(l.allow(v4(1), at(4000))));
    assert!(!l.allow(v4(1), at(100)));
    assert!(!l.allow(v4(1), Instant::ZERO));
    assert!(!l.allow(v4(1), at(4000)), "the way back earns nothing");
    assert!(l.allow(v4(1), at(4050)));
}
