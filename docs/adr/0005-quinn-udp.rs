//! Sends and receives the same datagrams over loopback, by quinn-udp and by ours; processor time for each. See 0005-udp-sockets.md.
use std::io::IoSliceMut;
use std::net::{SocketAddr, UdpSocket};
use std::time::Instant;
use forestvpn_quantum::batch::{Endpoint, Envelope, Train, Unsent};
use forestvpn_quantum::io::{RxSlots, Udp, UdpQueue};
use quinn_udp::{RecvMeta, Transmit, UdpSocketState, UdpSockRef, BATCH_SIZE};

fn cpu() -> f64 {
    let mut u: libc::rusage = unsafe { std::mem::zeroed() };
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut u) };
    let t = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    t(u.ru_utime) + t(u.ru_stime)
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (who, size, train, rounds): (&str, usize, usize, usize) =
        (&args[1], args[2].parse().unwrap(), args[3].parse().unwrap(), args[4].parse().unwrap());
    let bytes = vec![7u8; size * train];
    let batch = 8; // sends between two reads
    let (c0, t0) = (cpu(), Instant::now());
    let (mut sent, mut received) = (0usize, 0usize);
    if who == "quinn" {
        let a = UdpSocket::bind("127.0.0.1:0").unwrap();
        let b = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (sa, sb) = (UdpSocketState::new((&a).into()).unwrap(), UdpSocketState::new((&b).into()).unwrap());
        let _ = sb.set_recv_buffer_size((&b).into(), 4 << 20);
        let to: SocketAddr = b.local_addr().unwrap();
        let mut storage: Vec<Vec<u8>> = (0..BATCH_SIZE).map(|_| vec![0; 65536]).collect();
        let most = sa.max_gso_segments();
        for _ in 0..rounds {
            for _ in 0..batch {
                for chunk in bytes.chunks(size * train.min(most)) {
                    let t = Transmit { destination: to, ecn: None, contents: chunk, segment_size: (chunk.len() > size).then_some(size), src_ip: None };
                    if sa.try_send((&a).into(), &t).is_ok() { sent += chunk.len() / size; }
                }
            }
            loop {
                let mut bufs: Vec<IoSliceMut> = storage.iter_mut().map(|s| IoSliceMut::new(s)).collect();
                let mut meta = vec![RecvMeta::default(); BATCH_SIZE];
                match sb.recv(UdpSockRef::from(&b), &mut bufs, &mut meta) {
                    Ok(n) => received += meta[..n].iter().map(|m| m.len.div_ceil(m.stride.max(1))).sum::<usize>(),
                    Err(_) => break,
                }
            }
        }
    } else {
        let (mut a, mut b) = (Udp::new(), Udp::new());
        a.open(0, 0).unwrap();
        let port = b.open(0, 0).unwrap();
        let to = Endpoint::new(SocketAddr::from(([127, 0, 0, 1], port)));
        let mut slots = RxSlots::new(64);
        let one = Train { envelope: Envelope::new(to), stride: size, bytes: &bytes };
        let row = [one; 8];
        let mut unsent = Unsent::new();
        for _ in 0..rounds {
            a.send(&row[..batch], &mut unsent).unwrap();
            sent += batch * train;
            while let Ok(n) = b.recv(&mut slots) {
                for i in 0..slots.filled() {
                    if let Some(r) = slots.received(i) { received += r.bytes.len().div_ceil(r.stride.max(1)); }
                }
                if n < slots.count() { break; }
            }
        }
    }
    let c = cpu() - c0;
    println!("{who} size={size} train={train} sent={sent} received={received} cpu_us_per_datagram={:.3} wall={:.2}", c * 1e6 / received as f64, t0.elapsed().as_secs_f64());
}
