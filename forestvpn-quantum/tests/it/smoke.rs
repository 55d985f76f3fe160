//! The straight path, both ways.

use crate::harness::*;

#[test]
fn one_packet_each_way_crosses_the_tunnel() {
    let mut w = World::pair();
    w.connect(A, B);
    w.send(B, &packet(B, A, b"and back")).unwrap();
    w.settle();
    assert_eq!(w.payloads(A), [b"and back"]);
    let kinds: Vec<u8> = w.log.iter().map(Sent::kind).collect();
    assert_eq!(kinds, [1, 2, 4, 4], "initiation, response, data, data: no keepalive is needed");
}
